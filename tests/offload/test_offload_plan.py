"""Blocks, runs, chunks and plans: plain numbers."""

import random
from types import SimpleNamespace

import pytest

from offload import BlockPool, Chunk, Landing, Need, StreamPlan, pack, pack_together
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


def test_lists_that_begin_alike_pass_together():
    a, b, c = [1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6]
    assert pack_together([a, b, c], [0, 0, 0], 2) == [
        (Chunk((1, 2), 0), [0, 1, 2]),
        (Chunk((3,), 2), [0, 1, 2]),  # here b goes its own way
        (Chunk((4, 5), 3), [0, 2]),
        (Chunk((9,), 3), [1]),
        (Chunk((6,), 5), [2]),
    ]
    assert pack_together([a, c], [1, 0], 9) == [(Chunk((2, 3, 4, 5), 1), [0]), (Chunk((1, 2, 3, 4, 5, 6), 0), [1])]
    assert pack_together([], [], 2) == [] and pack_together([[], [1]], [0, 1], 2) == []


def test_every_list_of_a_tree_is_read_in_its_order_and_no_beginning_passes_twice():
    for seed in range(40):
        generator = random.Random(seed)
        lists = [[generator.randrange(100)]]
        for number in range(1, generator.randint(2, 8)):
            stem = generator.choice(lists)
            stem = stem[: generator.randint(0, len(stem))]
            lists.append(stem + [100 * number + i for i in range(generator.randint(0, 9))])
        firsts = [generator.choice([0, 0, 0, 2]) for _ in lists]
        blocks_per_slot = generator.randint(1, 5)
        chunks = pack_together(lists, firsts, blocks_per_slot)
        for number, blocks in enumerate(lists):
            mine = [chunk for chunk, readers in chunks if number in readers]
            assert [block for chunk in mine for block in chunk.blocks] == blocks[firsts[number] :]
            places = [chunk.begin + i for chunk in mine for i in range(len(chunk.blocks))]
            assert places == list(range(firsts[number], len(blocks)))
        for first in set(firsts):
            passing = [
                (chunk.begin + i, block)
                for chunk, readers in chunks
                if firsts[readers[0]] == first
                for i, block in enumerate(chunk.blocks)
            ]
            assert len(passing) == len(set(passing)), "a block passes twice"
        assert all(readers == sorted(readers) and len(chunk.blocks) <= blocks_per_slot for chunk, readers in chunks)


def test_the_transfers_of_a_plan_run_over_layers_without_chunks():
    a, b = Chunk((1,), 0), Chunk((2,), 1)
    plan = StreamPlan(([a, b], [], [a]))
    assert plan.transfers == [(0, a), (0, b), (2, a)]
    assert [need.through_ring for need in plan.needs] == [2, 0, 1]


def test_what_passes_through_the_ring_comes_first_at_a_cut():
    """The schedule counts by that order."""
    landed = SimpleNamespace(landing=Landing(0, 1))
    with pytest.raises(AssertionError, match="the ring's transfers come first"):
        StreamPlan(([landed, Chunk((1,), 0)], ())).needs  # noqa: B018
    assert StreamPlan(([Chunk((1,), 0), landed], ())).needs == (Need(1, (Landing(0, 1),)), Need())


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
    assert pool.lookup("b") is None and pool.published("c") is not None
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
    pool.rebuild([])
    assert pool.num_cached == 0 and pool.num_free == 2 and pool.lookup("key") is None


def test_references_beyond_the_first_are_counted():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.hold(a)
    pool.hold(a)
    pool.publish(b, "key")
    assert pool.lookup("key") == b and (pool.references(a), pool.num_shared) == (3, 3)
    assert pool.release([a, b, c]) == [c] and pool.num_shared == 1
    pool.release([b])
    pool.hold(b)  # it was cached
    assert pool.num_cached == 0 and pool.num_shared == 1
    pool.release([a, a, b])
    assert pool.num_shared == pool.num_used == 0
    with pytest.raises(AssertionError, match="block 0 is not held"):
        pool.hold(a)


def test_publishing_an_equal_block_twice_keeps_the_first():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.publish(a, "key")
    pool.publish(b, "key")
    pool.release([b])
    assert pool.num_cached == 0 and pool.lookup("key") == a
