"""Which full blocks stay on the GPU: random sequences of changes against a model of single blocks."""

import random

import numpy as np
import pytest

from nanoinfer.kv.residency import Residency


class Naive:
    """The same rules over sets: a line's blocks on the GPU, and which it holds in all."""

    def __init__(self, num_rows: int) -> None:
        self.on_gpu: list[set[int]] = [set() for _ in range(num_rows)]
        self.held = [range(0)] * num_rows

    @property
    def num_resident(self) -> int:
        return sum(map(len, self.on_gpu))

    @property
    def num_streamed(self) -> int:
        return sum(map(len, self.held)) - self.num_resident

    def set(self, row: int, begin: int, first: int, full: int) -> None:
        self.on_gpu[row], self.held[row] = set(range(first, full)), range(begin, full)

    def drop_one(self) -> tuple[int, int]:
        """The oldest block of the line that keeps most."""
        row = max(range(len(self.on_gpu)), key=lambda row: (len(self.on_gpu[row]), -row))
        block = min(self.on_gpu[row])
        self.on_gpu[row].remove(block)
        return row, block

    def promote(self, count: int, rows: list[int]) -> list[tuple[int, int]]:
        promoted = []
        for row in sorted(rows, key=lambda row: (len(self.on_gpu[row]), row)):
            streaming = sorted(set(self.held[row]) - self.on_gpu[row])
            taken = streaming[max(0, len(streaming) - (count - len(promoted))) :]
            self.on_gpu[row].update(taken)
            promoted += [(row, block) for block in taken]
        return promoted


def unshared(num_rows: int) -> Residency:
    """No two lines have a block in common."""
    table = np.arange(num_rows * 100).reshape(num_rows, 100)
    return Residency(table, table, np.zeros(num_rows, dtype=np.int64))


def assert_equal(residency: Residency, naive: Naive) -> None:
    assert (residency.num_resident, residency.num_streamed) == (naive.num_resident, naive.num_streamed)
    assert residency.streams.sum() == naive.num_streamed
    for row, blocks in enumerate(naive.on_gpu):
        assert blocks == set(range(residency.first[row], residency.full[row])), f"row {row}"


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_changes_equals_the_model_of_single_blocks(seed):
    generator = random.Random(seed)
    num_rows = generator.choice([1, 2, 5, 9])
    residency, naive = unshared(num_rows), Naive(num_rows)
    num_dropped = num_promoted = 0

    def change_to(row: int, begin: int, first: int, full: int) -> None:
        residency.begin[row] = begin
        residency.set(row, first, full)
        naive.set(row, begin, first, full)

    for _ in range(400):
        change = generator.choice(["set", "grow", "clear", "drop", "promote", "promote"])
        row = generator.randrange(num_rows)
        if change == "set":
            full = generator.randint(0, 12)
            first = generator.randint(0, full)
            change_to(row, generator.randint(0, first), first, full)
        elif change == "grow":  # and the window moves on, perhaps past what streams
            begin = int(residency.begin[row]) + generator.randint(0, 1)
            full = int(residency.full[row]) + 1
            change_to(row, begin, max(begin, int(residency.first[row])), full)
        elif change == "clear":
            residency.begin[row] = 0
            residency.clear(row)
            naive.set(row, 0, 0, 0)
        elif change == "drop":
            count = generator.randint(0, naive.num_resident)
            wanted = [naive.drop_one() for _ in range(count)]
            assert residency.drop(count) == wanted
            num_dropped += count
        else:
            rows = generator.sample(range(num_rows), generator.randint(0, num_rows))
            count = generator.randint(1, 10)
            wanted = naive.promote(count, rows)
            assert residency.promote(count, rows) == wanted and len(wanted) <= count
            num_promoted += len(wanted)
        assert_equal(residency, naive)
    assert num_dropped > 20 and num_promoted > 20


def test_the_fullest_line_gives_first_and_what_a_window_has_passed_comes_back_to_none():
    residency = unshared(2)
    residency.begin[:] = 0, 3
    residency.set(0, 0, 6)
    residency.set(1, 3, 6)
    assert residency.drop(7) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (0, 4), (1, 4)]
    assert (residency.num_resident, residency.num_streamed) == (2, 7)
    assert residency.promote(9, [1]) == [(1, 3), (1, 4)]


def test_a_drop_and_a_promotion_undo_each_other():
    residency = unshared(2)
    residency.set(0, 0, 5)
    residency.set(1, 2, 4)
    dropped = residency.drop(4)
    assert sorted(residency.promote(4, [0, 1])) == sorted(dropped)
    assert (residency.num_resident, residency.num_streamed) == (7, 2)


def test_only_the_rows_that_were_asked_for_are_promoted():
    residency = unshared(3)
    for row in range(3):
        residency.set(row, 4, 4)
    assert residency.promote(6, [2, 0]) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert residency.promote(9, []) == [] and residency.first.tolist() == [0, 4, 2]


def test_more_than_there_is_cannot_be_dropped():
    residency = unshared(1)
    residency.set(0, 1, 3)
    with pytest.raises(AssertionError, match="3 blocks to drop, 2 are there"):
        residency.drop(3)


# Rows that share


def tables(*rows: tuple[list[int], list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """GPU and host tables of rows given as (GPU blocks, host blocks); -1 where there is none."""
    return tuple(np.array([row[i] for row in rows], dtype=np.int32) for i in (0, 1))


def residency_of(*rows: tuple[list[int], list[int]]) -> Residency:
    """All blocks are full; those with a GPU block are noted as resident."""
    gpu, host = tables(*rows)
    residency = Residency(gpu, host, np.zeros(len(gpu), dtype=np.int64))
    for row, blocks in enumerate(gpu):
        residency.set(row, int((blocks < 0).sum()), len(blocks))
    return residency


def test_all_who_share_a_copy_drop_it_together():
    residency = residency_of(([5, 6, 7], [1, 2, 3]), ([5, 6, 8], [1, 2, 4]), ([9, 6, 8], [9, 2, 4]))
    assert residency.drop(1) == [(0, 0), (1, 0)]
    # Row 2 keeps most now; block 0 is its own. Then all three have GPU block 6 as their oldest.
    assert residency.drop(1) == [(2, 0)]
    assert residency.drop(1) == [(0, 1), (1, 1), (2, 1)]
    assert residency.drop(2) == [(0, 2), (1, 2), (2, 2)] and residency.num_resident == 0


def test_a_copy_that_another_row_has_behind_older_blocks_waits_for_these():
    """Row 1 keeps most; dropping the shared block 7 from it alone would free nothing."""
    residency = residency_of(([-1, 7, 8, 9], [1, 2, 3, 4]), ([6, 7, -9, -9], [1, 2, 5, 6]))
    residency.set(1, 0, 2)
    assert residency.drop(1) == [(1, 0)]
    assert residency.drop(1) == [(0, 1), (1, 1)]
    assert residency.drop(2) == [(0, 2), (0, 3)]


def test_rows_whose_next_block_is_the_same_get_it_as_one():
    residency = residency_of(([-1] * 4, [1, 2, 3, 4]), ([-1] * 4, [1, 2, 3, 9]), ([-1] * 4, [1, 2, 3, 4]))
    assert residency.promote(2, [0, 1, 2]) == [(0, 2), (0, 3), (2, 2), (2, 3)], "row 2 costs nothing"
    assert residency.promote(2, [1]) == [(1, 2), (1, 3)], "the table says nothing yet of who got block 3"
    assert residency.promote(9, [2, 0, 1]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_row_outside_of_the_step_gets_nothing_with_the_others():
    residency = residency_of(*[([-1] * 3, [1, 2, 3])] * 3)
    assert residency.promote(2, [0, 2]) == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert residency.first.tolist() == [1, 3, 1]


def test_a_row_takes_up_the_copies_that_others_have_and_makes_no_second_one():
    gpu, host = tables(([4, 5, 6, 7], [1, 2, 3, 4]), ([-1, -1, -1, -1], [1, 2, 3, 9]))
    residency = Residency(gpu, host, np.zeros(len(gpu), dtype=np.int64))
    residency.set(0, 1, 4)  # block 0 of row 0 has left, although the table still knows where it was
    residency.set(1, 4, 4)
    assert residency.join([1]) == [], "its newest block is its own"
    assert residency.promote(8, [1]) == [(1, 3)], "it can join behind that"
    gpu[1, 3] = 8
    assert residency.join([0]) == []
    assert residency.join([1]) == [(1, 2, 6), (1, 1, 5)] and residency.first.tolist() == [1, 1]
    assert residency.copy(1, 2) == 5 and residency.copy(0, 1) is None and residency.copy(1, 3) is None


def test_a_block_that_is_not_full_yet_is_no_copy():
    """Its host block is known before the step that fills it."""
    gpu, host = tables(([4, 5], [1, 2]), ([-1, -1], [1, 2]))
    residency = Residency(gpu, host, np.zeros(len(gpu), dtype=np.int64))
    residency.set(0, 0, 1)
    residency.set(1, 2, 2)
    assert residency.join([1]) == [] and residency.copy(1, 2) is None
    assert residency.copy(0, 1) == 4


@pytest.mark.parametrize("seed", range(8))
def test_every_drop_frees_a_copy_and_rows_keep_their_newest_blocks(seed):
    """Random rows of a tree whose tables follow what the policy says."""
    generator = random.Random(seed)
    num_rows, length = generator.choice([2, 4, 7]), 10
    trunk = list(range(100, 110))
    rows = []
    for row in range(num_rows):
        cut = generator.randint(4, length)
        rows.append(trunk[:cut] + [1000 + 20 * row + i for i in range(length - cut)])
        if generator.random() < 0.3:  # it computed its beginning itself, and found what follows
            rows[-1][0] = 2000 + row
    gpu, host = np.full((num_rows, length), -1), np.array(rows)
    residency = Residency(gpu, host, np.zeros(len(gpu), dtype=np.int64))
    for row in range(num_rows):
        residency.set(row, length, length)
    next_block, num_shared = 0, 0

    def copies() -> set[int]:
        return set(gpu[gpu >= 0].tolist())

    for _ in range(120):
        some = generator.sample(range(num_rows), generator.randint(1, num_rows))
        if generator.random() < 0.5:
            for row, block, copy in residency.join(some):
                assert row in some and copy in gpu[:, block] and gpu[row, block] == -1
                gpu[row, block] = copy
            count, new = generator.randint(0, 25), {}
            for row, block in residency.promote(count, some):
                assert row in some and gpu[row, block] == -1
                if host[row, block] not in new:
                    new[host[row, block]] = next_block = next_block + 1
                gpu[row, block] = new[host[row, block]]
            assert len(new) <= count
        else:
            before = copies()
            count = generator.randint(0, len(before))
            for row, block in residency.drop(count):
                gpu[row, block] = -1
            assert len(copies()) == len(before) - count
        for row in range(num_rows):
            assert (gpu[row] >= 0).tolist() == [block >= residency.first[row] for block in range(length)]
        held = [(int(g), int(h)) for g, h in zip(gpu.ravel(), host.ravel(), strict=True) if g >= 0]
        assert len({g for g, _ in held}) == len(set(held)) == len({h for _, h in held}), "one copy of each block"
        num_shared += len(held) - len(set(held))
    assert num_shared
