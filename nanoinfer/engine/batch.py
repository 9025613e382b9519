"""The sequences of one step: as the scheduler chooses them, and once the step was launched."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.requests.sequence import Sequence
from offload import Timeline


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [begin, end) of one sequence.

    Attributes:
        is_last: whether the next token can be sampled after this chunk.
    """

    sequence: Sequence
    begin: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class Batch:
    """Chunks of prompts, one new token for each of the sequences in `decoding`, or both (a mixed step)."""

    chunks: list[PrefillChunk]
    decoding: list[Sequence]

    @property
    def sequences(self) -> list[Sequence]:
        return [chunk.sequence for chunk in self.chunks] + self.decoding

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of `StepPlan.sampled_rows`."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last] + self.decoding


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
