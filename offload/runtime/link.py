"""One direction of an emulated link: how long it is busy, and who waits for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

# A copy that comes within this time of the end of the one before counts as having waited for it. What passes in
# between is the time of launches, which a copy on a slow link would hide, as its time is longer.
SLACK_NS = 20_000


class Link(ABC):
    """One direction of an emulated link. The work of a stream calls `begin` before each copy, and `end` behind it."""

    @abstractmethod
    def begin(self) -> None:
        """Note that a copy begins."""

    @abstractmethod
    def end(self, nanoseconds: int) -> None:
        """Let the time pass in which the copy that began last would still be under way."""


class HostLink(Link):
    """A link on which the host waits, as it does all the work of a stream.

    Args:
        now: gives the time in nanoseconds.
        sleep: waits so many seconds.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, sleep: Callable[[float], None] = time.sleep):
        self.now, self.sleep = now, sleep
        self._free = self._begun = 0

    def begin(self) -> None:
        now = self.now()
        self._begun = now if now - self._free > SLACK_NS else self._free

    def end(self, nanoseconds: int) -> None:
        self._free = self._begun + nanoseconds
        if (rest := self._free - self.now()) > 0:
            self.sleep(rest / 1e9)
