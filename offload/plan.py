"""What one step streams: the host blocks of its rows, packed into chunks of the ring's size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from offload.layout import KVLayout, runs
from offload.memory.host_pool import HostPool


class Transfer(Protocol):
    """Bytes in host memory, of whatever kind, that pass through one ring slot together.

    Equal transfers bring the same bytes: a transfer that was prefetched for the next step is kept if it equals the one
    that the step wants.

    Attributes:
        host_blocks: blocks of the host pool that are among these bytes. A prefetched transfer is dropped when one of
            them is released.
    """

    @property
    def host_blocks(self) -> tuple[int, ...]: ...

    def num_bytes(self, layout: KVLayout) -> int:
        """Return the number of bytes, no more than a ring slot has."""

    def copies(
        self, slot: torch.Tensor, host: HostPool
    ) -> Iterable[tuple[torch.Tensor, Sequence[torch.Tensor] | Mapping[int, torch.Tensor]]]:
        """Return (destination, sources) of each copy. slot: the ring slot, [bytes] uint8.

        `sources[layer]`, of the destination's shape, is what the copy for this layer brings.
        """


@dataclass(frozen=True)
class Chunk:
    """A `Transfer` of KV: host blocks that pass through one ring slot together; may belong to several sequences.

    Attributes:
        blocks: host block numbers; blocks[i] lies at place i of the ring slot.
        begin: index of the chunk's first block in the list, or in each of the lists, that was packed.
        tag: what the caller wants to know when the chunk is attended to.
    """

    blocks: tuple[int, ...]
    begin: int
    tag: object = None

    @property
    def host_blocks(self) -> tuple[int, ...]:
        return self.blocks

    def num_bytes(self, layout: KVLayout) -> int:
        return len(self.blocks) * layout.layer_block_bytes

    def copies(self, slot: torch.Tensor, host: HostPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield one copy for each run of neighbouring blocks."""
        places = slot.view(host.layout.dtype).view(-1, *host.layout.block_shape)
        for place, segment, begin, count in host_runs(self.blocks, host.blocks_per_segment):
            yield places[place : place + count], host.run(segment, begin, count)


def host_runs(blocks: tuple[int, ...], blocks_per_segment: int) -> list[tuple[int, int, int, int]]:
    """Return runs (place, segment, first block in the segment, count) of host blocks; one copy moves each run."""
    result = []
    for place, block, count in runs(list(enumerate(blocks))):
        while count:
            segment, within = divmod(block, blocks_per_segment)
            part = min(count, blocks_per_segment - within)
            result.append((place, segment, within, part))
            place, block, count = place + part, block + part, count - part
    return result


def pack(host_blocks: Sequence[int] | np.ndarray, blocks_per_slot: int) -> list[Chunk]:
    """Cut a list of host blocks into chunks of at most `blocks_per_slot`, in order."""
    blocks = [int(block) for block in host_blocks]
    return [
        Chunk(tuple(blocks[begin : begin + blocks_per_slot]), begin) for begin in range(0, len(blocks), blocks_per_slot)
    ]


def pack_together(
    lists: Sequence[Sequence[int]], firsts: Sequence[int], blocks_per_slot: int
) -> list[tuple[Chunk, list[int]]]:
    """Cut the blocks of several lists, from `firsts[i]` on in list i, into chunks of at most `blocks_per_slot`.

    Lists with the same first index share chunks as long as their blocks from there on are equal.

    Returns:
        (chunk, numbers of the lists that have it, ascending) for each chunk. The chunks of one list are in its order.
    """
    chunks: list[tuple[Chunk, list[int]]] = []
    waiting: list[tuple[int, list[int]]] = [
        (first, [i for i, other in enumerate(firsts) if other == first]) for first in dict.fromkeys(firsts)
    ]
    while waiting:
        begin, readers = waiting.pop(0)
        groups: dict[int, list[int]] = {}
        for i in readers:
            if begin < len(lists[i]):
                groups.setdefault(int(lists[i][begin]), []).append(i)
        for group in groups.values():
            parts = [tuple(map(int, lists[i][begin : begin + blocks_per_slot])) for i in group]
            shortest = min(map(len, parts))
            count = next((n for n, blocks in enumerate(zip(*parts, strict=False)) if len(set(blocks)) > 1), shortest)
            chunks.append((Chunk(parts[0][:count], begin), group))
            waiting.append((begin + count, group))
    return chunks


@dataclass(frozen=True)
class StreamPlan:
    """The transfers of each layer in one step. Layers that stream the same blocks share one list.

    Attributes:
        chunks: per layer, its transfers in the order in which they pass.
    """

    chunks: tuple[list[Transfer], ...]

    @cached_property
    def chunks_per_layer(self) -> tuple[int, ...]:
        return tuple(map(len, self.chunks))

    @cached_property
    def transfers(self) -> list[tuple[int, Transfer]]:
        """All (layer, transfer) pairs of the step, in the order in which they pass."""
        return [(layer, chunk) for layer, chunks in enumerate(self.chunks) for chunk in chunks]

    def blocks(self, layer: int) -> list[int]:
        """Return the host blocks that pass for a layer."""
        return [block for chunk in self.chunks[layer] for block in chunk.host_blocks]
