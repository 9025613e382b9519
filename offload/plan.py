"""What one step streams: the host blocks of its rows, packed into chunks of the ring's size, and what else it wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from offload.layout import KVLayout, runs
from offload.memory.host_pool import HostPool


class Transfer(Protocol):
    """Bytes in host memory, of whatever kind, that pass to the GPU together: through one ring slot, or to a place.

    Equal transfers bring the same bytes: a transfer that was prefetched for the next step is kept if it equals the one
    that the step wants.

    Attributes:
        host_blocks: blocks of the host pool that are among these bytes. A prefetched transfer is dropped when one of
            them is released.
        landing: where the bytes lie until they were used; None: in a ring slot.
    """

    @property
    def host_blocks(self) -> tuple[int, ...]: ...

    @property
    def landing(self) -> Landing | None: ...

    def num_bytes(self, layout: KVLayout) -> int:
        """Return the number of bytes, no more than a ring slot, or the place, has."""

    def copies(
        self, target: torch.Tensor, host: HostPool
    ) -> Iterable[tuple[torch.Tensor, Callable[[int | None], torch.Tensor]]]:
        """Return (destination, source) of each copy. target: the ring slot or the place, [bytes] uint8.

        `source(place)`, of the destination's shape, is what the copy brings to a cut that reads this place of a block.
        """


class KVPlace(NamedTuple):
    """Where a layer's keys and values lie: in blocks of a group of layers, at this place of each."""

    group: int
    place: int


class Landing(NamedTuple):
    """Where a transfer lies that does not pass through the ring.

    place: number of the place; until: number of the last piece that reads what lies there. A tuple, as `Need` is: each
    step looks a schedule up by them.
    """

    place: int
    until: int


@dataclass(frozen=True)
class Cut:
    """The end of a piece, where the engine can act before the next one.

    Attributes:
        reads: where the keys and values lie that the attention reads which lies here; None: none lies here. Its KV
            chunks pass through the ring, first of all that passes here.
        writes: where those lie that the piece before has made; None: it makes none.
        transfers: what each step wants here besides, each to a place of its own.
        in_large_steps: what steps of many rows want here besides, to places of their own.
    """

    reads: KVPlace | None = None
    writes: KVPlace | None = None
    transfers: tuple[Transfer, ...] = ()
    in_large_steps: tuple[Transfer, ...] = ()


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
    landing = None

    @property
    def host_blocks(self) -> tuple[int, ...]:
        return self.blocks

    def num_bytes(self, layout: KVLayout) -> int:
        return len(self.blocks) * layout.part_bytes

    def copies(
        self, target: torch.Tensor, host: HostPool
    ) -> Iterator[tuple[torch.Tensor, Callable[[int], torch.Tensor]]]:
        """Yield one copy for each run of neighbouring blocks."""
        places = target.view(-1, host.layout.part_bytes)
        for place, segment, begin, count in host_runs(self.blocks, host.blocks_per_segment):
            yield places[place : place + count], host.run(segment, begin, count).__getitem__


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
    """The transfers of one step. Cuts that want the same transfers may share one list.

    Attributes:
        at: for each cut, the one behind the last piece included, its transfers in the order in which they pass: those
            through the ring, then the others.
    """

    at: tuple[Sequence[Transfer], ...]

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """What each cut waits for, as `ring_schedule` takes it."""
        known = {id(found): Need.of(found) for found in self.at}
        return tuple(known[id(found)] for found in self.at)

    @cached_property
    def num_through_ring(self) -> int:
        """How many of the transfers take a ring slot."""
        return sum(need.through_ring for need in self.needs)

    @cached_property
    def transfers(self) -> list[tuple[int, Transfer]]:
        """All (cut, transfer) pairs of the step, in the order in which they pass."""
        return [(cut, transfer) for cut, found in enumerate(self.at) for transfer in found]


class Need(NamedTuple):
    """What passes at a cut: how many transfers through the ring, and behind these the landings of the others."""

    through_ring: int = 0
    landings: tuple[Landing, ...] = ()

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Need:
        landings = tuple(transfer.landing for transfer in transfers if transfer.landing is not None)
        through_ring = len(transfers) - len(landings)
        assert all(transfer.landing is None for transfer in transfers[:through_ring]), "the ring's transfers come first"
        return cls(through_ring, landings)
