"""Who takes part in a step: what the scheduler chooses and the planner makes a `StepPlan` of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

S = TypeVar("S")  # a sequence: what that is, only the side that plans steps knows


@dataclass(frozen=True)
class PrefillChunk(Generic[S]):
    """Tokens [begin, end) of one sequence.

    Attributes:
        is_last: whether the next token can be sampled after this chunk.
        passed: (end, slot) of each end before its own behind which the state is to be kept: in a slot taken for that.
    """

    sequence: S
    begin: int
    end: int
    is_last: bool
    passed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Batch(Generic[S]):
    """Chunks of prompts, one new token for each of the sequences in `decoding`, or both (a mixed step).

    Attributes:
        sequences: those of the chunks, then those of `decoding`.
        sampled: the sequences that get a token, in the order of `StepPlan.sampled_rows`.
        drafts: tokens that may come next of some of those in `decoding`. Each is a row of the step, behind its
            sequence's own.
        draft_masks: of those with a grammar, which tokens may come behind each of these.
    """

    chunks: list[PrefillChunk[S]]
    decoding: list[S]
    sequences: list[S]
    sampled: list[S]
    drafts: dict[S, list[int]] = field(default_factory=dict)
    draft_masks: dict[S, list[np.ndarray]] = field(default_factory=dict)

    def lines(self) -> Iterator[tuple[S, int, int | None]]:
        """Yield each row that decodes, in their order: its sequence, the number of a drafted token behind the last one,
        and that token. Of the last one itself the number is 0."""
        for sequence in self.decoding:
            yield sequence, 0, None
            for number, token_id in enumerate(self.drafts.get(sequence, ()), 1):
                yield sequence, number, token_id

    @property
    def sampled_lines(self) -> list[S]:
        """The sequence of each row that gets a token: those in `sampled`, each again for each of its drafted tokens."""
        if not self.drafts:
            return self.sampled
        return [sequence for sequence in self.sampled for _ in range(1 + len(self.drafts.get(sequence, ())))]
