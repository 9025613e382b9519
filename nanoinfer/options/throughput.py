"""Options of `nanoinfer bench throughput`."""

from __future__ import annotations

import argparse

from nanoinfer.options.measuring import add_engine_arguments, add_mode_argument, add_model_arguments

SUMMARY = "requests and tokens per second of many requests, and where the time goes"
DEFAULT_RANGE = "100-1024"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, which have vLLM's names."""
    add_model_arguments(parser)
    add_engine_arguments(parser)
    add_mode_argument(parser)
    for name in ("input", "output"):
        parser.add_argument(
            f"--{name}-len", default=DEFAULT_RANGE, help="tokens, a number or a range (default: %(default)s)"
        )
    parser.add_argument("--num-prompts", type=int, default=256, help="requests (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy (default: %(default)s)")
    parser.add_argument("--output-json", metavar="FILE", help="write all figures")
