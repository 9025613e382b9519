"""What a plan may choose: the prefill step, which weights are streamed, slots for experts, and where embeddings lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from nanoinfer.models.base import ModelSpec, SparseSpec
from nanoinfer.models.expert_slots import pool_bytes
from nanoinfer.models.streamed import landing_sizes, spread


class StreamedChoice(NamedTuple):
    """Which weights are streamed: of so many pieces, and of the head."""

    num_pieces: int = 0
    head: bool = False


class Candidate(NamedTuple):
    """What an engine's memory could be spent on; the pool of KV blocks takes what is left.

    Attributes:
        tokens: of a prefill step, at most.
        streamed: weights that are.
        num_expert_slots: as in `MemoryPlan`.
        embeddings: whether embeddings that may lie in host memory do.
    """

    tokens: int
    streamed: StreamedChoice = StreamedChoice()
    num_expert_slots: int = 0
    embeddings: bool = True


class StreamedSizes(NamedTuple):
    """Weights that are streamed: their pieces, their bytes in host memory, and those of their landing buffers."""

    pieces: tuple[int, ...]
    num_bytes: int
    landing_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What is freed on the GPU, which the landing buffers may take and more."""
        return self.num_bytes - self.landing_bytes


@lru_cache(maxsize=4096)
def sizes_of(spec: ModelSpec, streamed: StreamedChoice) -> StreamedSizes:
    """Kept: plans of many sizes stream the same."""
    pieces = spread(len(spec.piece_bytes), streamed.num_pieces)
    num_bytes = sum(spec.piece_bytes[piece] for piece in pieces) + spec.head_bytes * streamed.head
    return StreamedSizes(pieces, num_bytes, sum(landing_sizes(spec.run_bytes(pieces, streamed.head))))


@lru_cache(maxsize=4096)
def slot_bytes(sparse: SparseSpec, num_slots: int) -> int:
    """Return the bytes of the pools of experts with so many slots in each layer."""
    return pool_bytes(sparse.strides, sparse.num_experts, num_slots)


def choices(least: StreamedChoice, spec: ModelSpec, head: bool) -> Sequence[StreamedChoice]:
    """Return what may be streamed with the head or without, ascending: from what the settings ask for to all layers."""
    most = len(spec.piece_bytes) - 1
    # An even number: with an odd one the first piece of a step would wait for the landing buffer of the last.
    counts = {min(count + count % 2, most) for count in range(least.num_pieces, most + 1)}
    return [StreamedChoice(count, head) for count in sorted(counts)]
