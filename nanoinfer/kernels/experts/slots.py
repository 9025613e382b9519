"""Experts that lie in host memory: which of them a step brings to the GPU, and where to; and the copies.

Nothing here asks the host: two kernels, in a graph like any other. The first finds the experts that the rows choose and
gives those that are missing the slots that were not used for longest; those that find no slot go to spare runs, which
all layers share: the next layer overwrites them. The second copies runs from pinned host memory, which the GPU reads in
place: on an H200, 8 programs copy experts of 2.5 MB at 0.93 of the link's bandwidth, 16 no slower.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.choose import PAIRS_AT_ONCE
from nanoinfer.kernels.experts.slot_tables import SlotTables
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2

PROGRAMS = 16
"""That copy at a time. More than the link needs, and few beside what else wants it."""
BLOCK_WORDS = 4096
"""Words of 8 bytes that a program has on their way at a time."""
_NEVER = 2**62


@triton.jit(do_not_specialize=["num_pairs", "first_slot", "first_spare"])
def place_experts_kernel(
    ids,  # [num_pairs]
    held,  # [EXPERTS]
    owner,  # [SLOTS]
    used,  # [SLOTS]
    clock,  # [1]
    counts,  # [4]
    table,  # [EXPERTS]
    fetches,  # [1 + 2 * EXPERTS]
    victims,  # [SLOTS]
    num_pairs,
    first_slot,
    first_spare,
    EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    NEVER: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.arange(0, EXPERT_TILE)
    slot = tl.arange(0, SLOT_TILE)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    pairs = tl.zeros([EXPERT_TILE], tl.int32)
    for start in range(0, num_pairs, TILE):
        pair = start + tl.arange(0, TILE)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        pairs += tl.histogram(tl.maximum(chosen, 0), EXPERT_TILE, mask=chosen >= 0)
    now = tl.load(clock) + 1
    held_at = tl.load(held + expert, mask=expert < EXPERTS, other=-1)
    is_hit = (pairs > 0) & (held_at >= 0)
    is_missing = (pairs > 0) & (held_at < 0)
    # All threads have read the clock here, before one of them stores it: a late reader would take the new time for the
    # old one, and slots of this step for free.
    tl.debug_barrier()
    tl.store(used + (held_at - first_slot), now, mask=is_hit)
    tl.store(clock, now)
    tl.store(counts, tl.load(counts) + tl.sum(is_hit.to(tl.int32)))
    num_missing = tl.sum(is_missing.to(tl.int32))
    tl.store(fetches, num_missing)
    target = held_at
    if num_missing > 0:
        tl.debug_barrier()
        # The rank of each slot by when it was used last: those of this step come last, and are not given away.
        last = tl.load(used + slot, mask=slot < SLOTS, other=NEVER)
        rank = tl.zeros([SLOT_TILE], tl.int32)
        for start in range(0, SLOT_TILE, STEP):
            other = start + tl.arange(0, STEP)
            theirs = tl.load(used + other, mask=other < SLOTS, other=NEVER)
            is_older = theirs[None, :] < last[:, None]
            is_older = is_older | ((theirs[None, :] == last[:, None]) & (other[None, :] < slot[:, None]))
            rank += tl.sum(is_older.to(tl.int32), axis=1)
        is_free = (slot < SLOTS) & (last < now)
        num_free = tl.sum(is_free.to(tl.int32))
        tl.store(victims + rank, slot, mask=is_free)
        tl.debug_barrier()
        number = tl.cumsum(is_missing.to(tl.int32)) - 1
        takes_slot = is_missing & (number < num_free)
        own = tl.load(victims + number, mask=takes_slot, other=0)
        before = tl.load(owner + own, mask=takes_slot, other=-1)
        is_put_out = takes_slot & (before >= 0)
        tl.debug_barrier()  # of few experts, several threads read the owner of one slot
        tl.store(held + before, -1, mask=is_put_out)
        tl.store(owner + own, expert, mask=takes_slot)
        tl.store(used + own, now, mask=takes_slot)
        taken = tl.where(takes_slot, first_slot + own, first_spare + number - num_free)
        tl.store(held + expert, taken, mask=takes_slot)
        tl.store(fetches + 1 + 2 * number, expert, mask=is_missing)
        tl.store(fetches + 2 + 2 * number, taken, mask=is_missing)
        target = tl.where(is_missing, taken, held_at)
        num_placed = tl.minimum(num_missing, num_free)
        tl.store(counts + 1, tl.load(counts + 1) + num_placed)
        tl.store(counts + 2, tl.load(counts + 2) + num_missing - num_placed)
        tl.store(counts + 3, tl.load(counts + 3) + tl.sum(is_put_out.to(tl.int32)))
    tl.store(table + expert, tl.where(pairs > 0, target, -1), mask=expert < EXPERTS)


@triton.jit
def fetch_experts_kernel(
    home,  # [EXPERTS * WORDS] in host memory
    pool,  # [runs * WORDS]
    fetches,  # [1 + 2 * EXPERTS]
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    within = tl.arange(0, BLOCK)
    PARTS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    wait_for_inputs(PDL)
    num_parts = tl.load(fetches) * PARTS
    for number in range(tl.program_id(0), num_parts, PROGRAMS):
        fetch = number // PARTS
        at = number % PARTS * BLOCK + within
        expert = tl.load(fetches + 1 + 2 * fetch).to(tl.int64)
        target = tl.load(fetches + 2 + 2 * fetch).to(tl.int64)
        words = tl.load(home + expert * WORDS + at, mask=at < WORDS)
        tl.store(pool + target * WORDS + at, words, mask=at < WORDS)
    let_next_in(PDL)


def place_experts(ids: Tensor, slots: SlotTables) -> Tensor:
    """Bring the experts that rows choose to the pool, and return where each lies for this step: [num_experts] int32.

    Experts that nobody chooses have -1. The table holds until the next call for any layer of the pool.

    ids: of `choose_experts`.
    """
    num_experts, num_slots = len(slots.table), len(slots.owner)
    tile, slot_tile = min(PAIRS_AT_ONCE, max(32, next_power_of_2(ids.numel()))), max(32, next_power_of_2(num_slots))
    options = launch_options(slots.pool)
    place_experts_kernel[(1,)](
        ids, slots.held, slots.owner, slots.used, slots.clock, slots.counts, slots.table, slots.fetches, slots.victims,
        ids.numel(), slots.first_slot, slots.first_spare, EXPERTS=num_experts,
        EXPERT_TILE=max(32, next_power_of_2(num_experts)), SLOTS=num_slots, SLOT_TILE=slot_tile, TILE=tile,
        STEP=32, NEVER=_NEVER, num_warps=4, **options,
    )  # fmt: skip
    words = slots.stride // 8
    fetch_experts_kernel[(PROGRAMS,)](
        slots.home_words, slots.pool_words, slots.fetches, WORDS=words,
        BLOCK=min(BLOCK_WORDS, next_power_of_2(words)), PROGRAMS=PROGRAMS, num_warps=8, **options,
    )  # fmt: skip
    return slots.table
