"""A step that was launched."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.engine.scheduler import Batch
from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.requests.sequence import Sequence
from offload import Timeline


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched and not read yet.

    Attributes:
        sampled: the sequences that get a token, in the order of `tokens`.
        launched: `time.perf_counter` at the begin of the launch.
    """

    batch: Batch
    sampled: list[Sequence]
    tokens: PendingTokens
    launched: float
    streamed_bytes: int
    timeline: Timeline | None
