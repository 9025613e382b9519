"""How a command runs and ends: with its exit status, or with one line about the error that ended it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from nanoinfer.options.parser import Parser, in_options

REFUSED = 2
# The exit status that a shell reports for a process ended by a signal: 128 plus the signal's number.
INTERRUPTED = 130
BROKEN_PIPE = 141


def run_command(parser: Parser, arguments: Sequence[str], command: Callable[[argparse.Namespace], int]) -> int:
    """Read the arguments, run the command and return its exit status, or the status for the error that ended it.

    The user's errors and Ctrl-C are reported in one line on stderr, and so is a full GPU, with advice in place of
    torch's or CUDA's own error. A closed output pipe (`| head -1`) is not reported.
    """
    options = parser.parse_args(arguments)
    name = options.parser.prog
    try:
        try:
            options.parser.check(options)
            return command(options)
        finally:
            sys.stdout.flush()  # so that a broken pipe is noticed here and not when the interpreter ends
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, so stdout must lead to an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (RuntimeError, ValueError, MemoryError, OSError) as error:
        message = str(error)
        if isinstance(error, RuntimeError | ValueError):  # torch and triton raise the one; the other is a request's
            from nanoinfer.memory.machine import advice_when_full  # not above: reading options must not import torch

            advice = advice_when_full(message)
            if advice is None and isinstance(error, RuntimeError):
                raise
            message = advice or message
        print(f"{name}: {in_options(message, options.parser)}", file=sys.stderr)
        return REFUSED
