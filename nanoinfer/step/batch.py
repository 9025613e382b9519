"""What one step computes, as the scheduler makes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.requests.sequence import Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [begin, end) of one sequence."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts and, in a mixed step, one new token for each of the sequences in `decoding`."""

    chunks: list[PrefillChunk]
    decoding: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [chunk.sequence for chunk in self.chunks] + self.decoding


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each sequence."""

    sequences: list[Sequence]
