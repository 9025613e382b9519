"""Free blocks: which are handed out, and in what order."""

import random

import pytest

from offload.free_blocks import FreeBlocks


def free_blocks(count: int, stretch: int | None) -> FreeBlocks:
    found = FreeBlocks(stretch)
    found.add(range(count))
    return found


@pytest.mark.parametrize("stretch", [None, 1, 4, 7])
def test_each_number_is_handed_out_once(stretch):
    generator, free = random.Random(0), free_blocks(40, stretch)
    held, there = {}, 40
    for _ in range(2000):
        if held and (len(free) == 0 or generator.random() < 0.48):
            free.put(block := generator.choice(list(held)))
            del held[block]
        elif there < 60 and generator.random() < 0.02:
            free.add(range(there, there + 5))
            there += 5
        else:
            block = free.take(group := generator.randrange(3))
            assert 0 <= block < there and block not in held
            held[block] = group
        assert len(free) == there - len(held)


def test_one_group_or_one_stretch_takes_the_lowest():
    for free, groups in ((free_blocks(20, None), (0, 1, 2)), (free_blocks(20, 4), (0,))):
        taken = [free.take(groups[i % len(groups)]) for i in range(20)]
        assert taken == list(range(20))


def test_groups_that_take_in_turn_have_neighbours():
    free = free_blocks(64, 8)
    taken = [free.take(i % 3) for i in range(48)]
    for group in range(3):
        own = sorted(taken[group::3])
        assert own == [
            block for begin in sorted({block // 8 * 8 for block in own}) for block in range(begin, begin + 8)
        ]


def test_a_stretch_that_is_wholly_free_again_is_anybodys():
    free = free_blocks(8, 4)
    first, other = [free.take(0) for _ in range(4)], free.take(1)
    assert (first, other) == ([0, 1, 2, 3], 4)
    for block in first:
        free.put(block)
    assert free.take(2) == 0 and free.take(1) == 5
    assert [free.take(0) for _ in range(5)] == [1, 2, 3, 6, 7], "what others leave is taken where nothing else is"


def test_numbers_that_are_handed_out_come_back_to_their_stretch():
    free = FreeBlocks(4)
    free.add(range(8), {1, 2})
    assert free.take(0) == 4, "the first stretch is not wholly free"
    free.put(1)
    free.put(2)
    assert free.take(1) == 0
