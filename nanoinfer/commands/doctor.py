"""`nanoinfer doctor` on the command line."""

from __future__ import annotations

import argparse

from nanoinfer.common.units import counted
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser

_WIDTH = 12  # of the longest name, and of a space


def add_arguments(parser: Parser) -> None:
    add_engine_options(parser, only=("device",))


def run(options: argparse.Namespace) -> int:
    """Print what is found, with a sentence below what is not as it should be; return 0 if all is, else 1."""
    try:
        from nanoinfer.memory.health import examine
        from nanoinfer.memory.machine import resolve_device
    except ImportError as error:
        raise ValueError(f"nothing runs here, because an import fails: {error}") from error
    problems = 0
    for found in examine(resolve_device(options.device)):
        print(f"{found.name:{_WIDTH}} {found.value}", flush=True)
        if found.problem is not None:
            print(f"{'':{_WIDTH}} -> {found.problem}", flush=True)
            problems += 1
    print(f"\n{counted(problems, 'thing')} to look at" if problems else "\nall is as it should be")
    return 1 if problems else 0
