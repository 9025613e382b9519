"""The ring and the landing buffers: which transfer goes where, and when its target may be filled again.

The arithmetic is a pure function over integers (`ring_schedule`), tested for all small sizes; `Ring` and
`LandingBuffers` hold the buffers and the two events of each with which the offload engine turns its order into an order
of streams. A *place* is the number of a landing buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from offload.layout import KVLayout
from offload.plan import Need
from offload.runtime.base import Runtime


@dataclass(frozen=True)
class Compute:
    """Run section `section`, whose last piece is `last`."""

    section: int
    last: int


@dataclass(frozen=True)
class Fill:
    """Copy transfer `number` of this step (or, with `ahead`, of the next step) to a ring slot, or to a place."""

    number: int
    target: int
    is_place: bool
    ahead: bool


@dataclass(frozen=True)
class Use:
    """Use transfer `number`, which is wanted at cut `cut` and lies in `ring_slot`; it is used up then."""

    cut: int
    number: int
    ring_slot: int


@dataclass(frozen=True)
class Await:
    """Wait for transfer `number` of cut `cut` in its place, which later pieces read."""

    cut: int
    number: int
    place: int


@dataclass(frozen=True)
class Release:
    """The last piece that reads the place has been enqueued."""

    place: int


@lru_cache(maxsize=64)  # steps that stream as much as the one before ask for the same again
def ring_schedule(
    section_ends: tuple[int, ...],
    needs: tuple[Need, ...],
    num_ring_slots: int,
    *,
    first: int,
    filled: int,
    ahead: tuple[Need, ...] = (),
) -> tuple[Compute | Fill | Use | Await | Release, ...]:
    """Return the operations of one step over a ring and places, in order.

    Transfers are numbered through the step, cut after cut. Of those through the ring, the i-th lies in ring slot
    `(first + i) % num_ring_slots`, and the numbering goes on into the next step, so prefetch crosses the step boundary
    by the same rule. Fills come in the order in which they are needed, each as soon as its target is free: a ring slot
    when its transfer was used, a place behind the last piece that reads it.

    Args:
        section_ends: for each section the number of its last piece, ascending. Cut i lies behind piece i; nothing
            passes at a cut within a section, nor behind the last piece.
        needs: of each cut in this step, the one behind the last piece included.
        num_ring_slots: size of the ring, at least 1.
        first: running number of this step's first transfer through the ring.
        filled: how many of this step's transfers the step before has filled already.
        ahead: needs of the next step, whose first transfers may be filled towards the end.

    Returns:
        `Compute` of each section with the `Use` and `Await` operations of the cut behind it, and every `Fill` as early
        as it may be.
    """
    targets: list[tuple[int, bool]] = []  # of the transfers of this step, then of the next one
    slot, total = first, 0
    for number, need in enumerate((*needs, *ahead)):
        for _ in range(need.through_ring):
            targets.append((slot % num_ring_slots, False))
            slot += 1
        targets += [(landing.place, True) for landing in need.landings]
        total = len(targets) if number < len(needs) else total
    assert 0 <= filled <= total, f"{filled} of {total} transfers filled"
    held = set(targets[:filled])
    assert len(held) == filled, f"{filled} transfers filled in {num_ring_slots} slots"
    operations: list[Compute | Fill | Use | Await | Release] = []
    until: dict[int, int] = {}  # of the places that are read
    next_fill, used = filled, 0

    def fill() -> None:
        nonlocal next_fill
        while next_fill < len(targets) and targets[next_fill] not in held:
            held.add(targets[next_fill])
            operations.append(Fill(next_fill - total * (next_fill >= total), *targets[next_fill], next_fill >= total))
            next_fill += 1

    fill()
    for section, last in enumerate(section_ends):
        operations.append(Compute(section, last))
        for place in [place for place, piece in until.items() if piece <= last]:
            operations.append(Release(place))
            held.remove((place, True))
            del until[place]
        fill()
        for _ in range(needs[last].through_ring):
            assert used < next_fill, f"cut {last} waits for a ring slot that is not free: a place before it is held"
            operations.append(Use(last, used, targets[used][0]))
            held.remove(targets[used])
            used += 1
            fill()
        for landing in needs[last].landings:
            assert used < next_fill, f"cut {last} waits for place {landing.place}, which is read until later"
            operations.append(Await(last, used, landing.place))
            until[landing.place] = landing.until
            used += 1
    assert used == total, "a transfer passes within a section"
    assert not until, "a place is read by a piece that is not there"
    return tuple(operations)


class Ring:
    """Fixed-address GPU buffers with the two events of each.

    `bytes[s]` is ring slot s, [bytes] uint8; `slots[s]` is the same memory as `[blocks_per_slot, part_bytes]`: a small
    KV pool of its own, so attention reads it as it reads the GPU pool. `copied[s]` is recorded on the copy stream
    behind the fill of s, `used[s]` on the compute stream behind the last kernel that reads s.
    """

    def __init__(self, runtime: Runtime, layout: KVLayout, num_ring_slots: int, blocks_per_slot: int) -> None:
        self.num_ring_slots, self.blocks_per_slot = num_ring_slots, blocks_per_slot
        self.slots = torch.zeros(
            (num_ring_slots, blocks_per_slot, layout.part_bytes), dtype=torch.uint8, device=runtime.device
        )
        self.bytes = self.slots.view(num_ring_slots, -1)
        self.copied = [runtime.event() for _ in range(num_ring_slots)]
        self.used = [runtime.event() for _ in range(num_ring_slots)]


class LandingBuffers:
    """Fixed-address GPU buffers for transfers that stay while pieces read them, with the two events of each.

    `bytes[p]` is place p, [bytes] uint8. `copied[p]` is recorded on the copy stream behind the fill of p, `used[p]` on
    the compute stream behind the last piece that reads p.
    """

    def __init__(self, runtime: Runtime, memory: Sequence[torch.Tensor]) -> None:
        self.bytes = list(memory)
        self.copied = [runtime.event() for _ in memory]
        self.used = [runtime.event() for _ in memory]

    @torch.inference_mode()
    def clear(self) -> None:
        """Write zeros, which are safe to read as anything, such as indices: for who runs pieces outside of a step.

        Nothing may be in flight, and what was prefetched is lost.
        """
        for memory in self.bytes:
            memory.zero_()
