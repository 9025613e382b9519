"""`nanoinfer verify` on the command line."""

from __future__ import annotations

import argparse
import sys
import tempfile

import nanoinfer.verify
from nanoinfer.config import EngineConfig
from nanoinfer.models.shapes import SHAPES, refuse_shape, write_shape
from nanoinfer.options.parser import in_options, length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    parser.add_argument("model", nargs="?", help="checkpoint directory or hub id")
    parser.add_argument("--shape", help=f"random weights in a known shape instead: {', '.join(SHAPES)}")
    parser.add_argument("--gpu-memory", help='GPU memory limit, such as "12GiB"')
    parser.add_argument("--host-memory", help="host memory limit for KV blocks")
    parser.add_argument(
        "--context",
        type=length,
        help="prompt tokens of the longest request, such as 4k; default: what resident mode can hold",
    )
    parser.add_argument("--requests", type=int, default=4, help="requests of several lengths (default: %(default)s)")
    parser.add_argument("--output-len", type=length, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--kv-cache-dtype", default="auto", help='"auto" (as the model) or "fp8"')
    parser.add_argument("--device", default=defaults["device"])
    parser.add_argument("--attention-backend", default=defaults["attention_backend"])
    parser.add_argument("--seed", type=int, default=defaults["seed"])


def run(options: argparse.Namespace) -> int:
    """Runs `nanoinfer verify`, prints the report line by line and returns the exit code: 0 if all is equal, else 1.

    Raises:
        ValueError: an option cannot be used.
    """
    if (options.model is None) == (options.shape is None):
        raise ValueError("give either a model (checkpoint directory or hub id) or --shape")
    if options.model is not None:
        refuse_shape(options.model)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model if options.shape is None else str(write_shape(options.shape, directory))
        verdict = nanoinfer.verify.verify(
            model,
            num_requests=options.requests,
            context=options.context,
            output_len=options.output_len,
            seed=options.seed,
            progress=sys.stderr.isatty(),
            # Flush each part at once, even into a pipe, because all runs together take long.
            tell=lambda text: print(in_options(text, options.parser), flush=True),
            gpu_memory_limit=options.gpu_memory,
            host_memory_limit=options.host_memory,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            device=options.device,
            attention_backend=options.attention_backend,
            load_format="auto" if options.shape is None else "dummy",
        )
    print(f"\n{verdict.line()}")
    return 0 if verdict.is_identical else 1
