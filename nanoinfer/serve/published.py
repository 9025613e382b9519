"""An engine's figures as of the end of a step, for whoever reads them, and made only while somebody does."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from nanoinfer.engine.figures import PUBLISHED, Reading, values
from nanoinfer.engine.meter import DecodeTimes

logger = logging.getLogger("nanoinfer.serve")
LEAST_SECONDS = 0.2
"""Between two publications."""
_RECENT_SECONDS = 5.0


class Published(NamedTuple):
    """What `PUBLISHED` declares, by name. number: they count up. time: `time.monotonic` when they were read."""

    number: int
    time: float
    figures: dict[str, Any]


class Publisher:
    """Reads the figures between two steps, from counts that run along: while there is work no lock is entered, and no
    device is waited for.

    Who wants one asks, and gets it at the end of the step that runs, or of a later one: they are at least
    `LEAST_SECONDS` apart. All methods are called on the engine's thread.

    Args:
        server: of the figures that an engine has none of.

    Attributes:
        newest: what was published last.
        is_stale: whether anything has happened since. May be set on any thread.
    """

    def __init__(self, engine: Any, server: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._server, self._clock = engine, server, clock
        self.is_stale = True
        self.newest = Published(0, float("-inf"), {})
        self._asked: list[tuple[Future[Published], int]] = []
        self._times: deque[tuple[float, DecodeTimes]] = deque()  # of the last seconds, and one before

    def ask(self, known: int | None) -> Future[Published]:
        """Return the next one behind the one of this number; None: one that is true now."""
        future: Future[Published] = Future()
        if known is None:
            known = self.newest.number - (not self.is_stale)
        self._asked.append((future, known))
        return future

    @property
    def seconds_left(self) -> float | None:
        """Until `publish` would make one that somebody waits for; None: it is not wanted."""
        if not self._asked or not self.is_stale:
            return None
        return max(0.0, self.newest.time + LEAST_SECONDS - self._clock())

    def publish(self) -> None:
        """Publish the figures if somebody waits and it is time, and hand them to those who wait."""
        self._asked = [one for one in self._asked if not one[0].cancelled()]
        if not self._asked:
            return
        if self.seconds_left == 0:
            try:
                self._make(self._clock())
            except Exception as error:  # the engine goes on without who reads
                logger.exception("the figures cannot be read")
                self.fail(error)
                return
        waiting, self._asked = self._asked, []
        for future, known in waiting:
            if self.newest.number <= known:
                self._asked.append((future, known))
            elif future.set_running_or_notify_cancel():
                future.set_result(self.newest)

    def fail(self, error: Exception) -> None:
        """Tell all who wait that there will be no more."""
        for future, _ in self._asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._asked.clear()

    def _make(self, now: float) -> None:
        while len(self._times) > 1 and self._times[1][0] < now - _RECENT_SECONDS:
            self._times.popleft()
        # Where no step will do it, what the last ones have freed is given back here: perhaps not all of it yet.
        is_settled = self._engine.has_work or self._engine.give_back()
        times, self.is_stale = copy.copy(self._engine.meter.times), not is_settled
        recent = times.since(self._times[0][1]) if self._times else times
        self._times.append((now, times))
        reading = Reading(self._engine, recent, self._server, is_quick=True)
        self.newest = Published(self.newest.number + 1, now, values(PUBLISHED, reading))
