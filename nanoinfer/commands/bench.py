"""`nanoinfer bench` and `bench_offload.py`: the choice of the benchmark."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from nanoinfer.commands.full_device import advised_when_full
from nanoinfer.commands.model import check
from nanoinfer.models.shapes import SHAPES
from nanoinfer.options import bench, offload
from nanoinfer.options.parser import Parser, run_command

DEFAULT = "offload"
# What a benchmark is for, and its options. Its own module, such as `nanoinfer.bench.latency`, is imported when it runs.
BENCHMARKS = {
    "latency": (
        "seconds of one batch: to the first token, per token and in all, beside the floor",
        bench.add_latency_arguments,
    ),
    "throughput": (
        "requests and tokens per second of many requests, and where the time goes",
        bench.add_throughput_arguments,
    ),
    DEFAULT: (
        "decode with the KV cache in host memory against the GPU, with the floors of this machine",
        offload.add_arguments,
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add one command per benchmark, each with its options."""
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="benchmark", help="each has its own --help"
    )
    for name, (summary, add_options) in BENCHMARKS.items():
        summary += " (also without this word)" if name == DEFAULT else ""
        add_options(commands.add_parser(name, help=summary, description=summary))


def with_default(arguments: list[str]) -> list[str]:
    """Return the command line, with the default benchmark's name if `bench` is followed by none."""
    has_word = len(arguments) > 1 and (arguments[1] in ("-h", "--help") or not arguments[1].startswith("-"))
    return arguments if arguments[:1] != ["bench"] or has_word else ["bench", DEFAULT, *arguments[1:]]


def run(options: argparse.Namespace) -> int:
    """Run the benchmark, which prints its report. Return the exit status.

    Raises:
        ValueError: an option cannot be used; nothing has run then. Or the engine cannot run the benchmark as asked.
    """
    check(getattr(options, "model", None), SHAPES)
    if options.benchmark == "offload":
        offload.take_task(options)
    name = f"nanoinfer.bench.{options.benchmark}"
    if options.benchmark == "offload" and options.task != "decode":
        name = "nanoinfer.commands.recall" if options.task == "recall" else f"nanoinfer.bench.{options.task}"
    import_module(name).run(options)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python bench_offload.py`: the benchmark `offload` under another name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="bench_offload.py", description=BENCHMARKS["offload"][0])
    offload.add_arguments(parser)
    parser.set_defaults(benchmark="offload", command_line=f"python bench_offload.py {shlex.join(given)}".strip())
    return run_command(parser, given, advised_when_full(run))
