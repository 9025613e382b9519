"""`nanoinfer plan` on the command line."""

from __future__ import annotations

import argparse

import nanoinfer
from nanoinfer.models.shapes import SHAPES
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.parser import in_options, length

ENGINE_OPTIONS = (
    "gpu_memory_limit", "host_memory_limit", "enable_cpu_offload", "resident_kv_limit", "dtype", "kv_cache_dtype",
    "quantization", "head_quantization", "hf_overrides", "block_size", "max_num_batched_tokens", "num_ring_slots",
    "ring_slot_bytes",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"checkpoint directory, hub id, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--context", type=length, help="tokens of each sequence, output included, such as 32k")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--link-gbps", type=float, default="25", help="host to GPU, GB/s (default %(default)s)")
    parser.add_argument("--device-gbps", type=float, help="the GPU's memory, GB/s")
    texts = {
        "gpu_memory_limit": 'such as "12GiB"; default: this machine\'s',
        "host_memory_limit": 'such as "64GiB"; default: what is available here',
    }
    add_engine_options(parser, ENGINE_OPTIONS, defaults={"enable_cpu_offload": True}, texts=texts)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the forecast; return 1 if something does not fit."""
    arguments = engine_arguments(options)
    forecast = nanoinfer.plan(
        options.model,
        gpu_memory=arguments.pop("gpu_memory_limit"),
        host_memory=arguments.pop("host_memory_limit"),
        context=options.context,
        batch=options.batch,
        link_gbps=options.link_gbps,
        device_gbps=options.device_gbps,
        **arguments,
    )
    print(forecast.to_json() if options.json else in_options(forecast.report(), options.parser))
    return 0 if forecast.fits else 1
