"""What a command says when the GPU's memory is full."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def advised_when_full(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return the command with a MemoryError that gives advice in place of torch's or CUDA's own error."""

    def advised(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except (RuntimeError, ValueError) as error:  # what torch and triton raise; a request's error is a ValueError
            if "torch" not in sys.modules:
                raise  # and not import it now, which takes seconds
            from nanoinfer.memory.machine import advice_when_full  # not above: reading options must not import torch

            advice = advice_when_full(str(error))
            if advice is None:
                raise
            raise MemoryError(advice) from error

    return advised
