"""Who takes part in a step: what the scheduler chooses and the planner makes a `StepPlan` of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")  # a sequence: what that is, only the side that plans steps knows


@dataclass(frozen=True)
class PrefillChunk(Generic[S]):
    """Tokens [begin, end) of one sequence.

    Attributes:
        is_last: whether the next token can be sampled after this chunk.
    """

    sequence: S
    begin: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class Batch(Generic[S]):
    """Chunks of prompts, one new token for each of the sequences in `decoding`, or both (a mixed step).

    Attributes:
        sequences: those of the chunks, then those of `decoding`.
        sampled: the sequences that get a token, in the order of `StepPlan.sampled_rows`.
    """

    chunks: list[PrefillChunk[S]]
    decoding: list[S]
    sequences: list[S]
    sampled: list[S]
