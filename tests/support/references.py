"""Who holds which block, and what is promised: what must hold between any two steps, whatever has happened."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hollow import AllHaveRun

from nanoinfer import LLMEngine
from nanoinfer.kv.tables import present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK


def needed(engine: LLMEngine) -> dict[tuple[int, Sequence], int]:
    """How many blocks each row may need beside those that it holds, by group: of the host in offload mode; else of the
    GPU, and only where there is a window, as otherwise some give way."""
    tables, running, found = engine.kv_cache.tables, engine.scheduler.running, {}
    table, pool = tables.home
    for number, group in enumerate(tables.groups):
        if not (tables.is_offload or group.window):
            continue
        rows_of: dict[int, list[int]] = {}
        for one in running:
            for block in present(table[number, one.row]):
                rows_of.setdefault(block, []).append(one.row)
        for block in tables.owners.keys() & rows_of.keys():
            assert tables.owners[block] in rows_of[block], "who counts a block holds it"
        for one in running:
            held, size, longest = present(table[number, one.row]), group.block_size, one.max_num_tokens
            most = group.most_full(longest) if tables.is_offload else group.most_blocks(longest)
            num_coming = longest // size - one.num_computed // size if tables.is_offload else most
            if group.window:  # of rows that share a block one counts it; nobody does as long as others hold it, too
                alone = [block for block in held if pool.num_staying(block) == len(rows_of[block])]
                first = {block: min(rows_of[block]) for block in alone}
                own = [block for block in held if tables.owners.get(block, first.get(block)) == one.row]
                held, num_coming = own, num_coming + len(held) - len(own)  # which may become its own
            found[number, one] = max(0, min(most - len(held), num_coming))
    return found


def check_promises(engine: LLMEngine) -> None:
    """There is room for all that rows may need; in offload mode each is promised a block for its next token, if it has
    none."""
    kv_cache, tables, running = engine.kv_cache, engine.kv_cache.tables, engine.scheduler.running
    assert kv_cache.num_reserved_splits == sum(tables.num_splits(one.max_num_tokens) for one in running)
    assert kv_cache.num_promised_host == sum(sequence.num_promised_host for sequence in running)
    lifetimes, wanted, of_rows = tables.lifetimes, np.zeros_like(tables.promised), needed(engine)
    # What a copy on its way has held, too, may be counted by a row later only, which was promised more until then.
    is_exact = isinstance(lifetimes.acknowledgements, AllHaveRun) and not engine.scheduler.num_preemptions
    num_free = tables.gpu_blocks.num_free + lifetimes.num_deferred_gpu
    if tables.is_offload:
        num_free = lifetimes.host_blocks.num_free + lifetimes.num_deferred_host
        for number, group in enumerate(tables.groups):
            for one in running:
                wanted[number, one.row] = tables.gpu[number, one.row, one.num_computed // group.block_size] == NO_BLOCK
        for one in running:
            least = sum(of_rows[number, one] for number in range(len(tables.groups)))
            assert one.num_promised_host == least or one.num_promised_host > least and not is_exact
        assert kv_cache.copies.num_obtainable >= 0
    else:
        for (number, one), count in of_rows.items():
            wanted[number, one.row] = count
    assert np.all(tables.promised >= wanted) and (not is_exact or np.array_equal(tables.promised, wanted))
    assert num_free >= sum(of_rows.values()), "promised twice"


def check_references(engine: LLMEngine) -> int:
    """Each block of both pools is held once for each place in the tables, each copy on its way, and each that gave way;
    returns how many GPU blocks rows share."""
    check_promises(engine)
    kv_cache, lifetimes = engine.kv_cache, engine.kv_cache.tables.lifetimes
    held = Counter(kv_cache.tables.gpu[kv_cache.tables.gpu != NO_BLOCK].tolist())
    num_shared = sum(count > 1 for count in held.values())
    leaving = [block for deferred in lifetimes.deferred_gpu for block in deferred.blocks]
    assert not set(leaving) & set(held) and len(set(leaving)) == len(leaving), "given back, and in use"
    transfers = engine.mover.transfers
    loads = [group for group in transfers.groups if group.is_load and not (group.holds_gpu or group.of_states)]
    assert held.keys() >= {block for group in loads for block, _ in group.pairs}, (
        "a copy is on its way into a block that may be another's"
    )
    held.update(leaving)
    moving = transfers.held
    held.update(moving[0])
    on_host = Counter(kv_cache.tables.host[kv_cache.tables.host != NO_BLOCK].tolist())
    on_host.update(block for deferred in lifetimes.deferred_host for block in deferred.blocks)
    on_host.update(moving[1])
    on_host.update(block for sequence in engine.mover.away for block in sequence.kept_blocks + sequence.kept_state)
    assert on_host == lifetimes.host_blocks.holders
    slots = Counter(slot for one in engine.scheduler.running for slot in [one.state_slot, *one.draft_slots])
    pieces = [piece for group in transfers.groups if group.of_states for piece, _ in group.pairs]
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
