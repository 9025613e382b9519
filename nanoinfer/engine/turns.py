"""Whose turn it is with an engine: one thread at a time may be inside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress


class BusyError(RuntimeError):
    """Another thread is in a call of the engine."""


class Turns:
    """Whose turn it is: one thread at a time is in an engine, and whoever drops requests meanwhile waits for nobody.

    Args:
        end_dropped: ends the requests in `dropped` and removes them from it; called while nobody is inside.

    Attributes:
        dropped: ids of requests that must end and still may run. Others append to it at any moment.
    """

    def __init__(self, end_dropped: Callable[[], None]) -> None:
        self.dropped: list[str] = []
        self._end_dropped = end_dropped
        self._inside: dict[str, int] = {}  # the thread that is in a call, if one is

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse other threads while this one is inside. May be nested.

        A change that another thread has half made would be taken for an interrupted recovery, and end its requests.

        Raises:
            RuntimeError: another thread is inside. Nothing has changed.
        """
        caller, is_outermost = threading.get_ident(), not self._inside
        try:
            if self._inside.setdefault("thread", caller) != caller:  # one operation: no thread comes in between
                raise BusyError(
                    "another thread is in a call of this engine, and one at a time may be: wait until it has returned "
                    "(threading.Lock), give each thread an engine of its own, or ask a server (nanoinfer serve)"
                )
            yield
        finally:
            if is_outermost and self._inside.get("thread") == caller:
                self._inside.clear()
                self.drop(())

    def drop(self, request_ids: Iterable[str]) -> None:
        """End requests, of which some may have ended already, as soon as nobody is inside.

        For callers that cannot choose the moment: the garbage collector may close a generator on any thread, and also
        on the thread that is inside, in the midst of a step. So nobody waits here: whoever is inside ends them, in its
        next change or when it leaves.
        """
        self.dropped += request_ids
        while self.dropped and not self._inside:
            with suppress(BusyError):  # somebody came in meanwhile, and looks here when it leaves
                self._end_dropped()
