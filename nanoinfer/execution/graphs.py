"""Captured work by key: kept for the engine's life and replayed instead of launched again."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from offload import Graph, Runtime, Stream


class Graphs:
    """Graphs of one stream.

    Attributes:
        captured: for each key its graphs, in the order in which their work was given.
    """

    def __init__(self, runtime: Runtime, compute: Stream) -> None:
        self.captured: dict[Hashable, list[Graph]] = {}
        self._runtime, self._compute = runtime, compute

    def __contains__(self, key: Hashable) -> bool:
        return key in self.captured

    def capture(self, key: Hashable, *works: Callable[[], None]) -> None:
        """Capture each piece of work, unless there are graphs for the key."""
        if key not in self.captured:
            self.captured[key] = [self._runtime.capture(self._compute, work) for work in works]

    def run(self, key: Hashable, work: Callable[[], None], number: int = 0) -> bool:
        """Enqueue graph `number` of the key, or `work` if nothing is captured. Return whether it was a graph."""
        graphs = self.captured.get(key)
        if graphs is None:
            self._compute.run(work)
            return False
        self._compute.replay(graphs[number])
        return True
