"""`nanoinfer plan` on the command line."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nanoinfer
from nanoinfer.commands.model import check
from nanoinfer.models.checkpoints import checkpoint_named
from nanoinfer.models.shapes import SHAPES, shape_named
from nanoinfer.options.engine import add_engine_options, engine_arguments, option_words
from nanoinfer.options.parser import Parser, in_options

ENGINE_OPTIONS = (
    "max_model_len", "gpu_memory_limit", "host_memory_limit", "enable_cpu_offload", "resident_kv_limit",
    "resident_weights_limit", "cpu_offload_gb", "expert_slots", "dtype", "kv_cache_dtype", "quantization",
    "head_quantization", "hf_overrides", "tensor_parallel_size",
    "block_size", "max_num_batched_tokens", "num_ring_slots", "ring_slot_bytes",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help=f"checkpoint directory, GGUF file, hub id, or a shape: {', '.join(SHAPES)}"
    )
    parser.add_argument("--batch", type=int, help="sequences at once; default: as serve, with the time of one alone")
    parser.take_also("--batch", "--max-num-seqs")
    parser.add_argument("--gpu", metavar="CARD", help='memory and bandwidths of a card, such as "RTX 4070"')
    parser.add_argument("--compare-gpus", action="store_true", help="a table of all cards that are known")
    parser.add_argument("--link-gbps", type=float, help="host to GPU, GB/s; default: the card's, or 25")
    parser.add_argument("--device-gbps", type=float, help="the GPU's memory, GB/s; default: the card's")
    parser.add_argument(
        "--tokens-per-pass",
        type=float,
        default=1.0,
        metavar="N",
        help="as if drafts brought so many (default: 1, none)",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    texts = {
        "max_model_len": "tokens of each sequence, output included, such as 32k; default: as serve, timed with 32k",
        "gpu_memory_limit": 'such as "12GiB"; default: this machine\'s',
        "host_memory_limit": 'such as "64GiB"; default: what is available here',
    }
    add_engine_options(parser, ENGINE_OPTIONS, defaults={"enable_cpu_offload": "auto"}, texts=texts)
    parser.take_also("--max-model-len", "--context")
    parser.take_also("--tensor-parallel-size", "--gpus")


def run(options: argparse.Namespace) -> int:
    """Print the forecast; return 1 if something does not fit."""
    if shape_named(options.model) is None:
        check(options.model, SHAPES)
    gc.disable()  # what is imported and planned stays until the end: the collector would look at it for half a second
    try:
        return _run(options, engine_arguments(options))
    finally:
        gc.enable()


def _run(options: argparse.Namespace, arguments: dict) -> int:
    if options.compare_gpus:
        return _compare(options, arguments)
    forecast = nanoinfer.plan(
        options.model,
        gpu=options.gpu,
        batch=options.batch,
        link_gbps=options.link_gbps,
        device_gbps=options.device_gbps,
        tokens_per_pass=options.tokens_per_pass,
        **arguments,
    )
    print(forecast.to_json() if options.json else in_options(forecast.report(), options.parser))
    if not options.json and (line := _as_served(options, forecast)):
        print(line)
    return 0 if forecast.fits else 1


def _as_served(options: argparse.Namespace, forecast: Any) -> str | None:
    """Return what other commands do with this bare name, where that is not what was planned."""
    is_bare = checkpoint_named(options.model) is not None and not Path(options.model).exists()
    if not is_bare or options.quantization is not None or options.head_quantization is not None:
        return None
    from nanoinfer.memory.proposals import fastest_format  # with torch

    best = fastest_format(forecast.proposals)
    if best is None:
        return None
    words = shlex.join(option_words(best.changes, {}))
    return (
        f"\nThe plan is of the weights as they are. nanoinfer serve {options.model} takes {best.what}; to plan that, "
        f"add {words}."
    )


def _compare(options: argparse.Namespace, arguments: dict) -> int:
    """Print what each card can do; return 1 if none can."""
    from nanoinfer.memory.compare import compare_gpus, report  # with torch

    given = dict(gpu=options.gpu, gpu_memory_limit=arguments.pop("gpu_memory_limit"))
    given |= dict(link_gbps=options.link_gbps, device_gbps=options.device_gbps)
    if names := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"--compare-gpus takes each card's memory and bandwidths: leave out {names[0]}")
    found = compare_gpus(options.model, batch=options.batch, tokens_per_pass=options.tokens_per_pass, **arguments)
    if options.json:
        print(json.dumps({name: asdict(step) for name, step in found.items()}, indent=1))
    else:
        print(report(found))
    return 0 if any(step.fits for step in found.values()) else 1
