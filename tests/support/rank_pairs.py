"""Engines of several ranks for tests: their processes are started once, and play one engine after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nanoinfer import LLMEngine
from nanoinfer.engine import start
from nanoinfer.parallel.processes import Ranks

_kept: dict[int, Kept] = {}


class Kept(Ranks):
    """Ranks that are not ended with their engine."""

    def close(self, at_once: bool = False) -> None:
        if at_once or self.has_ended or not all(process.poll() is None for process in self.processes):
            _kept.pop(self.size, None)
            super().close(at_once)

    def end(self) -> None:
        super().close()


def kept_ranks(size: int, environment) -> Ranks:
    if size not in _kept:
        _kept[size] = Kept(size, environment)
    return _kept[size]


@contextmanager
def ranks_kept() -> Iterator[None]:
    """Within this, engines share their processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "Ranks", kept_ranks)
        try:
            yield
        finally:
            while _kept:
                _kept.popitem()[1].end()


def lives(engine: LLMEngine) -> list[bool]:
    """Whether the process of each rank runs."""
    return [process.poll() is None for process in engine.executor.ranks.processes]
