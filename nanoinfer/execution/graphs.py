"""Captured work by key: kept for the engine's life and replayed instead of launched again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from offload import Runtime, Stream


@dataclass(frozen=True)
class GraphWork:
    """What runs from graphs.

    Attributes:
        name: what the progress bar calls it.
        prepare: enqueues the inputs of the warm-up run with which a capture begins.
        launches: each becomes a graph.
    """

    key: Hashable
    name: str
    prepare: Callable[[], None]
    launches: Sequence[Callable[[], None]]


class Graphs:
    """All graphs of one engine, which run on one stream.

    Attributes:
        captured: for each key the functions that replay its graphs, in the order of `GraphWork.launches`.
    """

    def __init__(self, runtime: Runtime, compute: Stream) -> None:
        self.captured: dict[Hashable, list[Callable[[], None]]] = {}
        self._runtime, self._compute = runtime, compute

    def __contains__(self, key: Hashable) -> bool:
        return key in self.captured

    def capture(self, work: GraphWork) -> None:
        work.prepare()
        self.captured[work.key] = [self._runtime.capture(self._compute, launch) for launch in work.launches]

    def run(self, key: Hashable, work: Callable[[], None], number: int = 0) -> bool:
        """Enqueue graph `number` of the key, or `work` if nothing is captured. Return whether it was a graph."""
        graphs = self.captured.get(key)
        self._compute.run(work if graphs is None else graphs[number])
        return graphs is not None
