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
    """Counts the lines of the product that run, or raises at one of them.

    Attributes:
        counts: line -> how often it ran while `tracing`; behind `raise_at`, those inside of a function that it names.
        raised: the lines at which exceptions were raised, in their order.
    """

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()
        self.raised: list[Line] = []
        self._targets: list[tuple[Line, int, str | None]] = []
        self._error: Callable[[], BaseException] = KeyboardInterrupt
        self._raises = False
        self._count = self._count_line

    def raise_at(self, *targets: tuple[Line, int, str | None], error: Callable[[], BaseException]) -> None:
        """Raises when `line` is about to run for the nth time since the target before was reached.

        Args:
            targets: (line, n, function) each; with a function's name only what runs inside of it counts.
        """
        self._targets, self._error, self.counts = list(targets), error, Counter()
        self._raises = True

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        """Which lines of a function are looked at: those that may raise or are counted, since each takes its time."""
        if not frame.f_code.co_filename.startswith(ROOTS):
            return None
        if not self._raises:
            return self._count
        if not self._targets:
            return None
        (file, _), _, function = self._targets[0]
        return self._on_line if function is not None or frame.f_code.co_filename == file else None

    def _count_line(self, frame: FrameType, event: str, argument: Any) -> Callable:
        if event == "line":
            self.counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return self._count

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable:
        if event == "line" and self._targets:
            line = (frame.f_code.co_filename, frame.f_lineno)
            if self._targets[0][2] is None or _is_inside(frame, self._targets[0][2]):
                self.counts[line] += 1
                if self._targets[0][0] == line and self.counts[line] == self._targets[0][1]:
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
