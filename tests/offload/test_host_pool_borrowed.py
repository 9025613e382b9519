"""Borrowed blocks: pageable memory behind the host pool comes when it is wanted, and goes with those who hold it."""

import pytest
import torch

from offload import HostBlocks, HostPool, KVLayout
from offload.memory import host_pool
from offload.memory.pinned import PAGE_BYTES, HostArena

LAYOUT = KVLayout(num_places=2, part_bytes=PAGE_BYTES)


def opened(num_blocks: int, per_segment: int, **limits) -> HostPool:
    num_segments, size = -(-num_blocks // per_segment), LAYOUT.block_bytes
    last = num_blocks - (num_segments - 1) * per_segment
    how = dict(pinner=None, last_segment_bytes=last * size, on_demand=True)
    return HostPool(LAYOUT, num_blocks, per_segment, HostArena(num_segments, per_segment * size, **how), **limits)


def test_borrowed_memory_comes_with_the_blocks_and_goes_with_the_last_of_them():
    pool = opened(5, 2)
    blocks = HostBlocks(pool, 5)
    blocks.wait_for(3)
    assert blocks.num_blocks == 4, "two segments, and not the third"
    own, first = blocks.allocate(4), blocks.take_borrowed(pool.borrow(3))
    second = blocks.take_borrowed(pool.borrow(1))
    assert len({*own, *first, *second, 4}) == 9 and pool.borrowed_bytes == 4 * LAYOUT.block_bytes
    assert (blocks.num_used, len(blocks.borrowed), blocks.num_free) == (4, 4, 0)
    for block in own + first + second:
        for layer in range(LAYOUT.num_places):
            pool.block(layer, block).fill_(10 * block + layer)
    for block in own + first + second:
        assert all(torch.all(pool.block(layer, block) == 10 * block + layer) for layer in range(2)), "they overlap"
    blocks.publish(first[0], "content")
    pool.give_back(blocks.release(first[:2]))
    assert blocks.published("content") is None and not blocks.num_cached, "nobody finds what is gone"
    pool.give_back(blocks.release([*first[2:], *own]))
    assert blocks.num_free == 4 and pool.borrowed_bytes == LAYOUT.block_bytes
    assert blocks.take_borrowed(pool.borrow(1)) == first[:1], "numbers are used again"
    blocks.publish(second[0], "content")
    for held in (second, []):
        blocks.rebuild(held, lambda key: True)
        pool.give_back_all_but(blocks.borrowed)
        assert blocks.borrowed == set(held) and pool.borrowed_bytes == len(held) * LAYOUT.block_bytes
        assert blocks.num_free == 4 and (blocks.published("content") is None) == (not held), "its memory is gone"


def test_what_the_limit_or_the_machine_does_not_allow_is_a_memory_error(monkeypatch):
    pool = opened(2, 2, max_bytes=4 * LAYOUT.block_bytes)
    pool.borrow(3)
    pool.wait_for(1)  # 2 blocks
    with pytest.raises(MemoryError, match=f"host_memory_limit .{4 * LAYOUT.block_bytes} bytes, .* are taken.: raise"):
        pool.borrow(1)
    monkeypatch.setattr(host_pool, "memory_available_bytes", lambda: 10)
    with pytest.raises(MemoryError, match="KV of a preempted sequence: .* are wanted, 10 are available"):
        opened(2, 2).borrow(1)
    assert pool.borrowed_bytes == 3 * LAYOUT.block_bytes


def test_memory_on_demand_is_checked_against_what_is_available():
    """Who may not wait asks again; for who waits it is the last word."""
    size = LAYOUT.block_bytes
    arena = HostArena(3, size, pinner=None, on_demand=True, available_bytes=2 * size - 1)
    pool = HostPool(LAYOUT, 3, 1, arena)
    assert pool.wait_for(2, may_wait=False) == (2, None), "what is there already counts no more"
    arena = HostArena(3, 2 * size, pinner=None, on_demand=True, available_bytes=2 * size - 1)
    pool = HostPool(LAYOUT, 6, 2, arena)
    assert pool.wait_for(2, may_wait=False) == (0, None)
    num_usable, failure = pool.wait_for(2)
    assert num_usable == 0 and isinstance(failure, MemoryError) and "are available" in str(failure)


def test_who_wants_more_than_ever_before_has_some_pinned_ahead_as_long_as_there_is_memory():
    pool = opened(9, 1)
    blocks, pool.num_ahead = HostBlocks(pool, 9), 3
    for num_unused, num_wanted in ((1, 4), (1, 4), (2, 5), (1, 5), (4, 7), (9, 9)):
        blocks.wait_for(num_unused, may_wait=False)
        assert blocks.num_blocks == num_wanted
