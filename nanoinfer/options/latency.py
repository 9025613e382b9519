"""Options of `nanoinfer bench latency`."""

from __future__ import annotations

import argparse

from nanoinfer.options.measuring import add_engine_arguments, add_mode_argument, add_model_arguments
from nanoinfer.options.parser import length

SUMMARY = "seconds of one batch: to the first token, per token and in all, beside the floor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, which have vLLM's names."""
    add_model_arguments(parser)
    add_engine_arguments(parser)
    add_mode_argument(parser)
    parser.add_argument("--input-len", type=length, default=1024, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=length, default=128, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at once (default: %(default)s)")
    parser.add_argument("--num-iters", type=int, default=5, help="times that the batch runs (default: %(default)s)")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=1, help="times before, which do not count (default: %(default)s)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write all figures")
