"""The ring: which chunk goes into which ring slot, and when a slot may be filled again.

The arithmetic is a pure function over integers (`ring_schedule`), tested for all small sizes; `Ring` holds the
buffers and the two events per slot with which the offload engine turns its order into an order of streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from offload.layout import KVLayout
from offload.runtime.base import Runtime


@dataclass(frozen=True)
class Compute:
    """Run the piece before layer `layer`'s chunks (`num_layers` = the last piece)."""

    layer: int


@dataclass(frozen=True)
class Fill:
    """Copy chunk `chunk` of this step (or, with `ahead`, of the next step) into `ring_slot`."""

    chunk: int
    ring_slot: int
    ahead: bool


@dataclass(frozen=True)
class Attend:
    """Attend to chunk `chunk` of layer `layer`, which lies in `ring_slot`."""

    layer: int
    chunk: int
    ring_slot: int


@lru_cache(maxsize=64)  # steps that stream as many chunks as the one before ask for the same again
def ring_schedule(
    chunks_per_layer: tuple[int, ...], num_ring_slots: int, *, first: int, filled: int, chunks_ahead: int
) -> tuple[Compute | Fill | Attend, ...]:
    """Return the operations of one step over a ring, in order.

    Chunks are numbered through the step, layer after layer. Chunk i lies in ring slot `(first + i) % num_ring_slots`,
    and the numbering goes on into the next step, so prefetch crosses the step boundary by the same rule. A slot is
    filled again as soon as its chunk has been attended to, never before.

    Args:
        chunks_per_layer: number of chunks of each layer in this step.
        num_ring_slots: size of the ring, at least 1.
        first: running number of this step's chunk 0.
        filled: how many of this step's chunks the step before has filled already, at most `num_ring_slots`.
        chunks_ahead: how many chunks of the next step may be filled towards its end.

    Returns:
        `Compute(0)`, ..., `Compute(num_layers)` with each layer's `Attend` operations between, and every `Fill` as
        early as the ring allows.
    """
    total, operations = sum(chunks_per_layer), []
    assert 0 <= filled <= min(total, num_ring_slots), f"{filled} of {total} chunks filled in {num_ring_slots} slots"

    def fill(begin: int, end: int) -> None:
        for number in range(begin, min(end, total + chunks_ahead)):
            is_ahead = number >= total
            operations.append(Fill(number - total * is_ahead, (first + number) % num_ring_slots, is_ahead))

    fill(filled, num_ring_slots)
    chunk = 0
    for layer, num_chunks in enumerate(chunks_per_layer):
        operations.append(Compute(layer))
        for _ in range(num_chunks):
            operations.append(Attend(layer, chunk, (first + chunk) % num_ring_slots))
            fill(chunk + num_ring_slots, chunk + num_ring_slots + 1)
            chunk += 1
    operations.append(Compute(len(chunks_per_layer)))
    return tuple(operations)


class Ring:
    """Fixed-address GPU buffers with the two events of each.

    `bytes[s]` is ring slot s as raw bytes, [bytes] uint8; `slots[s]` is the same memory as
    `[blocks_per_slot, 2, block_size, num_kv_heads, head_dim]`: a small KV pool of its own, so attention reads it as it
    reads the GPU pool. `copied[s]` is recorded on the copy stream behind the fill of s, `attended[s]` on the compute
    stream behind the last kernel that reads s.
    """

    def __init__(self, runtime: Runtime, layout: KVLayout, num_ring_slots: int, blocks_per_slot: int) -> None:
        self.num_ring_slots, self.blocks_per_slot = num_ring_slots, blocks_per_slot
        self.slots = torch.zeros(
            (num_ring_slots, blocks_per_slot, *layout.block_shape), dtype=layout.dtype, device=runtime.device
        )
        self.bytes = self.slots.view(num_ring_slots, -1).view(torch.uint8)
        self.copied = [runtime.event() for _ in range(num_ring_slots)]
        self.attended = [runtime.event() for _ in range(num_ring_slots)]
