"""`nanoinfer bench offload` and `bench_offload.py`: times of decode steps, or answers about long contexts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from nanoinfer.bench import offload
from nanoinfer.commands import recall
from nanoinfer.measure.run import Row
from nanoinfer.options.offload import add_arguments, check_task
from nanoinfer.options.parser import Parser, run_command
from nanoinfer.recall.evaluate import Scores


def run(options: argparse.Namespace, command: str) -> list[Row] | dict[str, Scores]:
    """Runs all cases and prints the table; with --task recall, asks its questions.

    Args:
        options: as defined by `options.offload.add_arguments`.
        command: how the benchmark was called, for the JSON.

    Raises:
        ValueError: an option cannot be used; nothing has run then.
    """
    check_task(options)
    return (recall if options.task == "recall" else offload).run(options, command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python bench_offload.py`."""
    parser = Parser(
        prog="bench_offload.py",
        description="Decode with the KV cache in host memory against the GPU, with the floors of this machine.",
    )
    add_arguments(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)

    def command(options: argparse.Namespace) -> int:
        run(options, f"python bench_offload.py {shlex.join(given)}".strip())
        return 0

    return run_command(parser, given, command)
