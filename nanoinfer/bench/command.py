"""The benchmark's command line: which cases, in which order, and what is printed."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoinfer.bench.floors import Floors, measure_floors
from nanoinfer.bench.hf import CACHES, load_reference, measure_reference
from nanoinfer.bench.measure import Row, add_floor, compare, measure, release
from nanoinfer.bench.report import explain, plot, table, write_json
from nanoinfer.bench.shapes import SHAPES, write_shape
from nanoinfer.build import resolve_device
from nanoinfer.config import EngineConfig
from nanoinfer.errors import nearest
from nanoinfer.llm import LLM

MODES = ("offload", "resident", *CACHES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="checkpoint directory or hub id")
    model.add_argument("--shape", help=f"random weights in a known shape: {', '.join(SHAPES)}")
    parser.add_argument("--context", help="prompt tokens, such as 1k,8k,32k (k = 1024)")
    parser.add_argument("--batch", default="1", help="sequences at once, such as 1,8")
    parser.add_argument("--output-len", type=int, help="tokens to generate")
    parser.add_argument("--mode", default="offload,resident", help=f"of {', '.join(MODES)}")
    parser.add_argument("--gpu-memory", help='GPU memory limit, such as "12GiB"')
    parser.add_argument("--host-memory", help="host memory limit for KV blocks")
    parser.add_argument("--num-ring-slots", type=int, default=defaults["num_ring_slots"])
    parser.add_argument("--ring-slot-bytes", help='bytes of one ring slot, such as "32MiB"')
    parser.add_argument("--block-size", type=int, help="tokens per KV block")
    parser.add_argument("--max-num-seqs", type=int, help="rows of the decode batch; default: the largest batch")
    parser.add_argument("--prefill-chunk", type=int, help="tokens of one prefill step")
    parser.add_argument("--attention-backend", default=defaults["attention_backend"])
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--device", default=defaults["device"])
    parser.add_argument("--seed", type=int, default=defaults["seed"])
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw ms per token over context")
    parser.add_argument("--no-progress", action="store_true")


@dataclass(frozen=True)
class _Plan:
    """The cases of one call."""

    modes: list[str]
    contexts: list[int]
    batches: list[int]
    output_len: int


def run(options: argparse.Namespace) -> list[Row]:
    """Runs all cases and prints the table.

    Raises:
        ValueError: an option cannot be used; nothing has run then.
    """
    device = resolve_device(options.device)
    is_cuda = device.type == "cuda"
    plan = _Plan(
        modes=_names(options.mode),
        contexts=_counts(options.context or ("1k,8k,32k" if is_cuda else "256,1k"), "--context"),
        batches=_counts(options.batch, "--batch"),
        output_len=options.output_len or (28 if is_cuda else 12),
    )
    if plan.output_len < 1:
        raise ValueError(f"--output-len {plan.output_len} must be at least 1")
    with tempfile.TemporaryDirectory() as directory:
        model = options.model
        if model is None:
            model = str(write_shape(options.shape or ("qwen3-4b" if is_cuda else "tiny"), directory))
        floors = measure_floors(device)
        rows: list[Row] = []
        for mode in plan.modes:
            rows += _run_mode(mode, model, options, plan, device, floors)
    compare(rows)
    print(table(rows))
    print(explain(floors, device))
    if options.json:
        write_json(options.json, rows, floors, device, " ".join(map(shlex.quote, sys.argv)))
    if options.plot:
        plot(options.plot, rows)
    return rows


def _run_mode(
    mode: str, model: str, options: argparse.Namespace, plan: _Plan, device: torch.device, floors: Floors
) -> list[Row]:
    cases = [(batch, context) for context in plan.contexts for batch in plan.batches]
    load_format = "dummy" if options.model is None else "auto"
    if mode in CACHES:
        reference = load_reference(
            model, dtype=options.dtype, device=device, load_format=load_format, seed=options.seed
        )
        rows = []
        for batch, context in cases:
            lengths, progress = [context] * batch, not options.no_progress
            rows.append(
                measure_reference(mode, reference, device, lengths, plan.output_len, options.seed, floors, progress)
            )
        del reference
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return rows
    try:
        llm = LLM(model, **_arguments(mode, options, plan, load_format))
    except (ValueError, MemoryError) as error:
        return [Row(mode=mode, batch=batch, context=context, problem=str(error)) for batch, context in cases]
    rows = []
    warm_up = min(plan.contexts)
    measure(llm, [warm_up], 4, options.seed + 1, None, False)  # compiles the prefill kernels
    before = floors
    for batch, context in cases:
        lengths = [context] * batch
        try:
            row = measure(llm, lengths, plan.output_len, options.seed, None, not options.no_progress)
            after = measure_floors(device, repeats=5)
            add_floor(row, llm, lengths, plan.output_len, (before, after))
            before = after
        except ValueError as error:
            row = Row(mode=mode, batch=batch, context=context, problem=str(error))
        rows.append(row)
    release(llm)
    return rows


def _arguments(mode: str, options: argparse.Namespace, plan: _Plan, load_format: str) -> dict:
    longest = max(plan.contexts) + plan.output_len
    arguments = dict(
        enable_cpu_offload=mode == "offload",
        load_format=load_format,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        attention_backend=options.attention_backend,
        num_ring_slots=options.num_ring_slots,
        ring_slot_bytes=options.ring_slot_bytes,
        max_num_seqs=options.max_num_seqs or max(plan.batches),
        max_model_len=longest,
        max_num_batched_tokens=options.prefill_chunk,
        gpu_memory_limit=options.gpu_memory,
        host_memory_limit=options.host_memory,
        enable_prefix_caching=False,  # each case computes its own prompt
        progress_bar=not options.no_progress,
    )
    if options.block_size is not None:
        arguments["block_size"] = options.block_size
    return arguments


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODES:
            hint = nearest(name, MODES)
            guess = f" (did you mean {hint!r}?)" if hint else ""
            raise ValueError(f"--mode {name!r} is not known{guess}: choose from {', '.join(MODES)}")
    return names


def _counts(text: str, option: str) -> list[int]:
    counts = []
    for part in text.split(","):
        part = part.strip().lower()
        factor, digits = (1024, part[:-1]) if part.endswith("k") else (1, part)
        if not digits.isdigit() or int(digits) < 1:
            raise ValueError(f"{option} {text!r} must be whole numbers of at least 1, such as 1,8 or 1k,32k")
        counts.append(int(digits) * factor)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python bench_offload.py`."""
    parser = argparse.ArgumentParser(
        prog="bench_offload.py",
        description="Decode with the KV cache in host memory against the GPU, with the floors of this machine.",
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    for option in (options.json, options.plot):
        if option and not Path(option).absolute().parent.is_dir():
            parser.error(f"the directory of {option!r} does not exist")
    try:
        run(options)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
