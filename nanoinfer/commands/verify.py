"""`nanoinfer verify` on the command line."""

from __future__ import annotations

import argparse
import sys

import nanoinfer.verify
from nanoinfer.commands.model import check
from nanoinfer.models.shapes import SHAPES
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.measuring import open_model
from nanoinfer.options.parser import Parser, in_options, length

# The runs choose the other arguments of their engines.
ENGINE_OPTIONS = (
    "gpu_memory_limit", "host_memory_limit", "dtype", "quantization", "head_quantization", "kv_cache_dtype", "device",
    "attention_backend", "hf_overrides", "seed", "tensor_parallel_size",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory, GGUF file or hub id")
    parser.add_argument("--shape", help=f"random weights in a known shape instead: {', '.join(SHAPES)}")
    parser.add_argument(
        "--context",
        type=length,
        help="prompt tokens of the longest request, such as 4k; default: what resident mode can hold",
    )
    parser.add_argument("--requests", type=int, default=4, help="requests of several lengths (default: %(default)s)")
    parser.add_argument("--output-len", type=length, help="tokens to generate (default: 32, on a CPU 8)")
    texts = dict(tensor_parallel_size="GPUs of one run more, which is compared with the others: 2")
    add_engine_options(parser, ENGINE_OPTIONS, texts=texts)


def run(options: argparse.Namespace) -> int:
    """Print the report line by line; return 0 if all is equal, else 1."""
    if (options.model is None) == (options.shape is None):
        raise ValueError("give either a model (checkpoint directory, GGUF file or hub id) or --shape")
    check(options.model, SHAPES)
    with open_model(options, "cpu") as (model, _):
        verdict = nanoinfer.verify.verify(
            model,
            num_requests=options.requests,
            context=options.context,
            output_len=options.output_len,
            progress=sys.stderr.isatty(),
            # Flush each part at once, even into a pipe, because all runs together take long.
            tell=lambda text: print(in_options(text, options.parser), flush=True),
            note=lambda text: print(
                f"{options.parser.prog}: {in_options(text, options.parser)}", file=sys.stderr, flush=True
            ),
            load_format="auto" if options.shape is None else "dummy",
            **engine_arguments(options),
        )
    print(f"\n{verdict.line()}")
    return 0 if verdict.is_identical else 1
