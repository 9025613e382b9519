"""`nanoinfer bench`: the choice of the benchmark."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

from nanoinfer.options import exactness, latency, offload, throughput

# Each benchmark's options. Its own module, such as `nanoinfer.bench.latency`, is imported only when it runs.
BENCHMARKS = {"latency": latency, "throughput": throughput, "offload": offload, "exactness": exactness}
DEFAULT = "offload"
_HOMES = {"offload": "nanoinfer.commands.bench_offload"}  # modules of benchmarks that join more than one library


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds one command per benchmark, each with its options."""
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        summary = benchmark.SUMMARY + (" (also without this word)" if name == DEFAULT else "")
        benchmark.add_arguments(commands.add_parser(name, help=summary, description=summary))


def with_default(arguments: list[str]) -> list[str]:
    """Return the command line, with the default benchmark's name if `bench` is followed by none."""
    if arguments[:1] != ["bench"] or arguments[1:2] in (["-h"], ["--help"]):
        return arguments
    if len(arguments) > 1 and not arguments[1].startswith("-"):
        return arguments
    return ["bench", DEFAULT, *arguments[1:]]


def run(options: argparse.Namespace, command: str) -> int:
    """Runs the benchmark that the options name, prints its report and returns the exit status: 1 where bits differ.

    Args:
        command: how the benchmark was called, for the JSON.

    Raises:
        ValueError: an option cannot be used; nothing has run then. Or the engine cannot run the benchmark as asked.
        MemoryError: the GPU is full.
    """
    import torch  # not at the top: reading the options must not import torch

    run_benchmark = import_module(_HOMES.get(options.benchmark, f"nanoinfer.bench.{options.benchmark}")).run
    if options.benchmark == "exactness":
        from nanoinfer.serve.local import local_server

        run_benchmark = partial(run_benchmark, local_server=local_server)
    try:
        figures = run_benchmark(options, command)
    except torch.OutOfMemoryError as error:  # its message has many lines
        reason = str(error).splitlines()[0]
        raise MemoryError(f"{reason} Lower --gpu-memory, or end what else runs on the GPU") from error
    return 1 if options.benchmark == "exactness" and not figures["identical"] else 0
