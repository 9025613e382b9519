"""Blocks, runs, chunks and plans: plain numbers."""

import random

import pytest

from offload import BlockPool, Chunk, StreamPlan, pack
from offload.layout import runs
from offload.plan import host_runs


def test_runs_join_neighbours_in_both_pools_only():
    assert runs([]) == []
    assert runs([(4, 7), (5, 8), (6, 9)]) == [(4, 7, 3)]
    assert runs([(4, 7), (5, 9), (6, 10), (8, 11)]) == [(4, 7, 1), (5, 9, 2), (8, 11, 1)]


def test_host_runs_cover_every_block_once_and_stay_inside_segments():
    generator = random.Random(0)
    for _ in range(300):
        blocks = tuple(generator.sample(range(40), generator.randint(1, 12)))
        if generator.random() < 0.5:
            blocks = tuple(range(blocks[0], blocks[0] + len(blocks)))
        per_segment = generator.randint(1, 9)
        covered = {}
        for place, segment, begin, count in host_runs(blocks, per_segment):
            assert begin + count <= per_segment
            for i in range(count):
                covered[place + i] = segment * per_segment + begin + i
        assert tuple(covered[place] for place in range(len(blocks))) == blocks


def test_pack_cuts_in_order_without_loss():
    chunks = pack([5, 6, 7, 1, 2], 2)
    assert [chunk.blocks for chunk in chunks] == [(5, 6), (7, 1), (2,)]
    assert [chunk.begin for chunk in chunks] == [0, 2, 4]
    assert pack([], 2) == []


def test_plan_head_runs_over_layers_without_chunks():
    a, b = Chunk((1,), 0), Chunk((2,), 1)
    plan = StreamPlan(([a, b], [], [a]))
    assert plan.head(3) == [(0, a), (0, b), (2, a)]
    assert plan.head(9) == plan.head(3)
    assert plan.head(1) == [(0, a)]


def test_pool_hands_out_lowest_numbers_and_refuses_more_than_it_has():
    pool = BlockPool(5, first=1)
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(MemoryError, match="2 blocks wanted, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.num_used == 3
    assert pool.release([2]) == [2]
    assert pool.allocate(2) == [2, 4]


def test_cached_blocks_come_back_by_key_and_are_evicted_oldest_first():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block, key in ((a, "a"), (b, "b"), (c, "c")):
        pool.publish(block, key)
    assert pool.release([b]) == [] and pool.release([a]) == [] and pool.release([c]) == []
    assert pool.num_free == 3 and pool.num_cached == 3
    assert pool.lookup("a") == a and pool.references(a) == 1
    assert pool.allocate(1) == [b], "b was released first"
    assert pool.lookup("b") is None and pool.contains("c")
    assert pool.lookup("c") == c and pool.num_free == 0


def test_of_a_sequence_the_last_block_is_evicted_first():
    """What is left of a prefix can be found from its beginning only."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.publish(block, f"key {block}")
    pool.release(blocks[:3])
    pool.release(blocks[3:])
    assert pool.allocate(2) == [blocks[2], blocks[1]]


def test_shared_blocks_are_freed_by_the_last_holder():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, "key")
    assert pool.lookup("key") == block and pool.references(block) == 2
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_used == 0 and pool.num_cached == 1
    pool.clear_cache()
    assert pool.num_cached == 0 and pool.num_free == 2 and pool.lookup("key") is None


def test_publishing_an_equal_block_twice_keeps_the_first():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.publish(a, "key")
    pool.publish(b, "key")
    pool.release([b])
    assert pool.num_cached == 0 and pool.lookup("key") == a
