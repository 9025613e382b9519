"""`nanoinfer plan` on the command line."""

from __future__ import annotations

import argparse

import nanoinfer
from nanoinfer.models.shapes import SHAPES
from nanoinfer.options.parser import in_options, length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("model", help=f"checkpoint directory, hub id, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--gpu-memory", help='such as "12GiB"; default: this machine\'s')
    parser.add_argument("--host-memory", help='such as "64GiB"; default: what is available here')
    parser.add_argument("--context", type=length, help="tokens of each sequence, output included, such as 32k")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--link-gbps", type=float, help="host to GPU, GB/s (default 25)")
    parser.add_argument("--device-gbps", type=float, help="the GPU's memory, GB/s")
    parser.add_argument("--offload", choices=("on", "auto", "off"), default="on")
    parser.add_argument("--resident-kv", help="bytes of KV that may stay on the GPU; 0 streams all")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help='"auto" (as the model) or "fp8"')
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--prefill-chunk", type=length, help="tokens of one prefill step")
    parser.add_argument("--num-ring-slots", type=int)
    parser.add_argument("--ring-slot-bytes")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the forecast; return 1 if something does not fit."""
    arguments = dict(
        enable_cpu_offload={"on": True, "auto": "auto", "off": False}[options.offload],
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        resident_kv_limit=0 if options.resident_kv == "0" else options.resident_kv,
        max_num_batched_tokens=options.prefill_chunk,
        ring_slot_bytes=options.ring_slot_bytes,
    )
    for name in ("block_size", "num_ring_slots", "link_gbps"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    forecast = nanoinfer.plan(
        options.model,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory,
        context=options.context,
        batch=options.batch,
        device_gbps=options.device_gbps,
        **arguments,
    )
    print(forecast.to_json() if options.json else in_options(forecast.report(), options.parser))
    return 0 if forecast.fits else 1
