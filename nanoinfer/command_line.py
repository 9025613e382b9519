"""How every command ends: one line on stderr where something went wrong, and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

REFUSED = 2
# As a shell says it of a process that the signal has ended: 128 and the signal's number.
INTERRUPTED = 130
BROKEN_PIPE = 141


def run_command(name: str, command: Callable[[], int]) -> int:
    """Runs the command and gives its exit status, or that of what ended it.

    Errors of the user and a Ctrl-C are one line on stderr; a reader who has left (`| head -1`) is not told.

    Args:
        name: how the line begins, such as "nanoinfer plan".
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # a broken pipe shows here, and not when the interpreter ends
    except KeyboardInterrupt:
        _report(f"{name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, MemoryError, OSError) as error:
        _report(f"{name}: {error}")
        return REFUSED


def _report(line: str) -> None:
    print(line, file=sys.stderr)
