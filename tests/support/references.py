"""Who holds which block, and what is promised: what must hold between any two steps, whatever has happened."""

from __future__ import annotations

from collections import Counter

import numpy as np

from nanoinfer import LLMEngine
from nanoinfer.step.plan import NO_BLOCK


def check_promises(engine: LLMEngine) -> None:
    """No more is promised than there is; offload mode promises a row a block for its next token, if it has none."""
    kv_cache, running = engine.kv_cache, engine.scheduler.running
    assert kv_cache.num_reserved_splits == sum(kv_cache.tables.num_splits(one.max_num_tokens) for one in running)
    assert kv_cache.num_promised_host == sum(sequence.num_promised_host for sequence in running)
    assert kv_cache.num_unpromised_host >= 0 and kv_cache.copies.num_obtainable >= 0, "promised twice"
    tables, wanted = kv_cache.tables, np.zeros_like(kv_cache.tables.promised)
    for sequence in running if tables.is_offload else ():
        for number, group in enumerate(tables.groups):
            tail = tables.gpu[number, sequence.row, sequence.num_computed // group.block_size]
            wanted[number, sequence.row] = tail == NO_BLOCK
    of_windows = [] if tables.is_offload else tables.windowed
    assert np.array_equal(np.delete(tables.promised, of_windows, 0), np.delete(wanted, of_windows, 0))


def check_references(engine: LLMEngine) -> int:
    """Each block of both pools is held once for each place in the tables, each copy on its way, and each that gave way;
    returns how many GPU blocks rows share."""
    check_promises(engine)
    kv_cache, lifetimes = engine.kv_cache, engine.kv_cache.tables.lifetimes
    held = Counter(kv_cache.tables.gpu[kv_cache.tables.gpu != NO_BLOCK].tolist())
    num_shared = sum(count > 1 for count in held.values())
    leaving = [block for deferred in lifetimes.deferred_gpu for block in deferred.blocks]
    assert not set(leaving) & set(held) and len(set(leaving)) == len(leaving), "given back, and in use"
    held.update(leaving)
    moving = engine.mover.transfers.held
    held.update(moving[0])
    on_host = Counter(kv_cache.tables.host[kv_cache.tables.host != NO_BLOCK].tolist())
    on_host.update(block for deferred in lifetimes.deferred_host for block in deferred.blocks)
    on_host.update(moving[1])
    on_host.update(block for sequence in engine.mover.away for block in sequence.kept_blocks + sequence.kept_state)
    assert on_host == lifetimes.host_blocks.holders
    slots = Counter(slot for one in engine.scheduler.running for slot in [one.state_slot, *one.draft_slots])
    pieces = [piece for group in engine.mover.transfers.groups if group.of_states for piece, _ in group.pairs]
    slots.update(piece // kv_cache.tables.blocks_of_state for piece in pieces)
    assert slots == kv_cache.slots.holders
    pool, taken = kv_cache.tables.gpu_blocks, getattr(engine, "taken", [])
    assert held + Counter(taken) == pool.holders
    assert pool.num_shared == sum(pool.holders.values()) - len(pool.holders)
    if not kv_cache.tables.is_offload:
        return num_shared
    begin, first, full = kv_cache.tables.begins.ravel(), kv_cache.copies.residency.first, kv_cache.copies.residency.full
    gpu, host = (table.reshape(len(first), -1) for table in (kv_cache.tables.gpu, kv_cache.tables.host))
    for line in range(len(first)):
        assert begin[line] <= first[line] or not full[line]
        assert np.all(gpu[line, : first[line]] == NO_BLOCK)
        assert np.all(gpu[line, first[line] : full[line]] != NO_BLOCK)
        assert np.all(host[line, begin[line] : full[line]] != NO_BLOCK) and np.all(
            host[line, : begin[line]] == NO_BLOCK
        )
    places = [(line, block) for line in range(len(first)) for block in range(first[line], full[line])]
    assert kv_cache.copies.num_resident == len({int(gpu[place]) for place in places})
    streams = {int(host[line, block]) for line in range(len(first)) for block in range(begin[line], first[line])}
    assert kv_cache.copies.num_streamed == len(streams)
    if engine.plan.max_resident_blocks is not None:
        assert kv_cache.copies.num_resident <= engine.plan.max_resident_blocks
    return num_shared
