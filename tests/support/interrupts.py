"""Raises an exception at any line of the product, once, to see what is left behind."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import nanoinfer
import offload

ROOTS = tuple(str(Path(package.__file__).parent) + "/" for package in (nanoinfer, offload))

Line = tuple[str, int]


class Tracer:
    """Counts the lines of the product that run, and raises at one of them.

    Attributes:
        counts: line -> how often it ran while `tracing`.
        raised: the lines at which exceptions were raised, in their order.
    """

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()
        self.raised: list[Line] = []
        self._targets: list[tuple[Line, int, str | None]] = []
        self._error: Callable[[], BaseException] = KeyboardInterrupt

    def raise_at(self, *targets: tuple[Line, int, str | None], error: Callable[[], BaseException]) -> None:
        """Raises when `line` is about to run for the nth time since the target before was reached.

        Args:
            targets: (line, n, function) each; with a function's name only what runs inside of it counts.
        """
        self._targets, self._error, self.counts = list(targets), error, Counter()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        return self._on_line if frame.f_code.co_filename.startswith(ROOTS) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            if not self._targets or self._targets[0][2] is None or _is_inside(frame, self._targets[0][2]):
                self.counts[line] += 1
                if self._targets and self._targets[0][0] == line and self.counts[line] == self._targets[0][1]:
                    del self._targets[0]
                    self.counts.clear()
                    self.raised.append(line)
                    raise self._error()
        return self._on_line


def _is_inside(frame: FrameType | None, function: str) -> bool:
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.startswith(ROOTS):
            return True
        frame = frame.f_back
    return False


def name(line: Line) -> str:
    """A line as a reader looks it up."""
    return f"{Path(line[0]).parent.name}/{Path(line[0]).name}:{line[1]}"
