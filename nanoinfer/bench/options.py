"""The benchmark's options: what they mean, and what is refused before anything runs."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.bench.hf import CACHES
from nanoinfer.bench.measure import TRACED_OUTPUT_LEN
from nanoinfer.bench.shapes import SHAPES
from nanoinfer.config import EngineConfig
from nanoinfer.errors import nearest

# What is measured: arguments of the engine that differ.
ENGINE_MODES: dict[str, dict] = {
    "streamed": dict(enable_cpu_offload=True, resident_kv_limit=0),
    "offload": dict(enable_cpu_offload=True),
    "auto": dict(enable_cpu_offload="auto"),
    "resident": dict(enable_cpu_offload=False),
}
MODES = (*ENGINE_MODES, *CACHES)
DEFAULT_OUTPUT_LEN = 28  # 27 decode steps, of which 24 are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options; those of the engine have the engine's defaults."""
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="checkpoint directory or hub id")
    model.add_argument("--shape", help=f"random weights in a known shape: {', '.join(SHAPES)}")
    parser.add_argument("--context", help="prompt tokens, such as 1k,8k,32k (k = 1024)")
    parser.add_argument("--batch", default="1", help="sequences at once, such as 1,8")
    parser.add_argument("--output-len", type=int, default=DEFAULT_OUTPUT_LEN, help="tokens to generate")
    parser.add_argument(
        "--mode",
        default="streamed,resident",
        help="streamed = offload with every full block in host memory, offload = with what fits on the GPU, auto = "
        "offload once the GPU is full, resident, hf and hf-static = transformers' offloaded caches (default: %(default)s)",
    )
    parser.add_argument("--gpu-memory", help='GPU memory limit, such as "12GiB"')
    parser.add_argument("--host-memory", help="host memory limit for KV blocks")
    parser.add_argument("--num-ring-slots", type=int, default=defaults["num_ring_slots"])
    parser.add_argument("--ring-slot-bytes", help='bytes of one ring slot, such as "32MiB"')
    parser.add_argument("--block-size", type=int, default=defaults["block_size"], help="tokens per KV block")
    parser.add_argument("--max-num-seqs", type=int, help="rows of the decode batch; default: the largest batch")
    parser.add_argument("--prefill-chunk", type=int, help="tokens of one prefill step")
    parser.add_argument("--attention-backend", default=defaults["attention_backend"])
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--device", default=defaults["device"])
    parser.add_argument("--seed", type=int, default=defaults["seed"])
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare tokens and log-probabilities of our modes; default: where at least two of them run",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument(
        "--profile", metavar="FILE", help="write a trace of the last case of each mode, for https://ui.perfetto.dev"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw ms per token over context")
    parser.add_argument("--no-progress", action="store_true")


@dataclass(frozen=True)
class Cases:
    """What one call measures.

    Attributes:
        modes: of `MODES`, in the order in which they run.
        contexts: tokens of a prompt.
        batches: sequences at once.
        output_len: tokens that each sequence generates.
        check: compare the outputs of our modes.
    """

    modes: list[str]
    contexts: list[int]
    batches: list[int]
    output_len: int
    check: bool

    @property
    def last(self) -> list[int]:
        """Prompt lengths of the last case."""
        return [self.contexts[-1]] * self.batches[-1]


def read_cases(options: argparse.Namespace, is_cuda: bool) -> Cases:
    """The cases that the options ask for.

    Raises:
        ValueError: an option cannot be used.
    """
    modes = _names(options.mode)
    can_compare = len(set(modes) & set(ENGINE_MODES)) > 1
    if options.check and not can_compare:
        raise ValueError(f"--check compares our modes, --mode is {options.mode}: name two of {', '.join(ENGINE_MODES)}")
    if options.output_len < 1:
        raise ValueError(f"--output-len {options.output_len} must be at least 1")
    for option in (options.json, options.plot, options.profile):
        if option and not Path(option).absolute().parent.is_dir():
            raise ValueError(f"the directory of {option!r} does not exist: make it first")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    return Cases(
        modes=modes,
        contexts=_counts(options.context or ("1k,8k,32k" if is_cuda else "256,1k"), "--context"),
        batches=_counts(options.batch, "--batch"),
        output_len=options.output_len,
        check=can_compare if options.check is None else options.check,
    )


def engine_arguments(options: argparse.Namespace, cases: Cases, mode: str, context: int) -> dict:
    """Arguments of the LLM that runs every case of `mode` up to `context` tokens."""
    return ENGINE_MODES.get(mode, {}) | dict(
        load_format="auto" if options.model is not None else "dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        attention_backend=options.attention_backend,
        num_ring_slots=options.num_ring_slots,
        ring_slot_bytes=options.ring_slot_bytes,
        block_size=options.block_size,
        max_num_seqs=max(cases.batches) if options.max_num_seqs is None else options.max_num_seqs,
        max_model_len=context + max(cases.output_len, TRACED_OUTPUT_LEN if options.profile else 0),
        max_num_batched_tokens=options.prefill_chunk,
        gpu_memory_limit=options.gpu_memory,
        host_memory_limit=options.host_memory,
        enable_prefix_caching=False,  # each case computes its own prompt
        progress_bar=not options.no_progress,
    )


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODES:
            hint = nearest(name, MODES)
            guess = f" (did you mean {hint!r}?)" if hint else ""
            raise ValueError(f"--mode {name!r} is not known{guess}: choose from {', '.join(MODES)}")
    if not names:
        raise ValueError(f"--mode {text!r} names no mode: choose from {', '.join(MODES)}")
    return names


def _counts(text: str, option: str) -> list[int]:
    """Ascending and each once, so that a case is never measured twice."""
    counts = set()
    for part in text.split(","):
        part = part.strip().lower()
        factor, digits = (1024, part[:-1]) if part.endswith("k") else (1, part)
        if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
            raise ValueError(f"{option} {text!r} must be whole numbers of at least 1, such as 1,8 or 1k,32k")
        counts.add(int(digits) * factor)
    return sorted(counts)
