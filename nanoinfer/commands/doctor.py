"""`nanoinfer doctor` on the command line."""

from __future__ import annotations

import argparse

from nanoinfer.common.units import counted
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser

_WIDTH = 12  # of the longest name, and of a space


def add_arguments(parser: Parser) -> None:
    add_engine_options(parser, only=("device",))
    parser.epilog = (
        "The exit status is 0 where all that is there works, with or without a GPU, and 1 where something is broken."
    )


def run(options: argparse.Namespace) -> int:
    """Print what is found, with a sentence below what is not as it should be.

    Return 0 if all that is there works, as on a machine without a GPU or with a slow one; 1 if something does not.
    """
    try:
        from nanoinfer.devices.registry import resolve_device
        from nanoinfer.memory.health import examine
    except ImportError as error:
        raise ValueError(f"nothing runs here, because an import fails: {error}") from error
    problems = broken = 0
    for found in examine(resolve_device(options.device)):
        print(f"{found.name:{_WIDTH}} {found.value}", flush=True)
        if found.problem is not None:
            print(f"{'':{_WIDTH}} -> {found.problem}", flush=True)
            problems, broken = problems + 1, broken + found.is_broken
    works = f"{broken} of them broken" if broken else "what is there works"
    print(f"\n{counted(problems, 'thing')} to look at, {works}" if problems else "\nall is as it should be")
    return 1 if broken else 0
