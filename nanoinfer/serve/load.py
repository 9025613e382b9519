"""What the server did in the last seconds, for one line of the log every ten seconds while it has work."""

from __future__ import annotations

import copy
from typing import Any

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.figures import COUNTER, FIGURES, Reading

LOAD_SECONDS = 10.0
Load = dict[str, Any]
"""`seconds`, and by their names in the log what `FIGURES` declares: rates over these, and the state at their end."""
LOGGED = [(figure, *figure.log.split(":", 1)) for figure in FIGURES if figure.log]
"""Of each figure its name in the log, and how the log's text says its value."""


class LoadMeter:
    """Says after a step what the server did since it last said so, if that is long enough ago.

    The seconds begin with a step. Where no step runs for as long as `seconds`, they begin again: then the server was
    idle, and nothing is said of that.

    Args:
        engine: asked on its own thread, between two steps.
        server: as of `Reading`.
        seconds: at least so long between two answers.
    """

    def __init__(self, engine: LLMEngine, server: Any, seconds: float = LOAD_SECONDS) -> None:
        self._engine, self._server, self.seconds = engine, server, seconds
        self._begin = self._last = float("-inf")

    def before_step(self, now: float) -> None:
        """Note that a step begins `now`, in seconds of any clock."""
        if now - self._last >= self.seconds:
            self._begin = now
            self._note()

    def after_step(self, now: float) -> Load | None:
        """Note that the step has ended; return the load if it is time to say it."""
        self._last = now
        if now - self._begin < self.seconds:
            return None
        seconds, before, times, prefill_seconds = now - self._begin, self._values, self._times, self._prefill_seconds
        self._begin = now
        self._note()
        load: Load = {"seconds": seconds}
        for figure, name, _ in LOGGED:
            value = self._values[name]
            load[name] = (value - before[name]) / seconds / figure.per if figure.kind == COUNTER else value
        decoded = self._times.since(times)
        load["bound"] = "prefill" if self._prefill_seconds - prefill_seconds > decoded.seconds else decoded.bound
        return load

    def _note(self) -> None:
        """Keep the figures as they are now."""
        reading = Reading(self._engine, server=self._server)
        self._values = {name: figure.value(reading) for figure, name, _ in LOGGED}
        self._times, self._prefill_seconds = copy.copy(reading.times), reading.meter.prefill_seconds
