"""Which full blocks stay on the GPU: random sequences of changes against a model of single blocks."""

import random

import pytest

from offload import Residency


class Naive:
    """The same rules over sets: a row's blocks on the GPU, how many it has in all, and where its window begins."""

    def __init__(self, num_rows: int) -> None:
        self.on_gpu: list[set[int]] = [set() for _ in range(num_rows)]
        self.full = [0] * num_rows
        self.window = [0] * num_rows

    @property
    def num_resident(self) -> int:
        return sum(map(len, self.on_gpu))

    @property
    def num_streamed(self) -> int:
        return sum(self.full) - self.num_resident

    def set(self, row: int, first: int, full: int, window: int) -> None:
        self.on_gpu[row] = set(range(first, full))
        self.full[row], self.window[row] = full, min(window, full)

    def drop_one(self) -> tuple[int, int]:
        """The oldest block of the row that keeps most outside its window; inside, once no row has one outside."""
        outside = [[block for block in blocks if block < w] for blocks, w in zip(self.on_gpu, self.window, strict=True)]
        candidates = outside if any(outside) else [sorted(blocks) for blocks in self.on_gpu]
        row = max(range(len(candidates)), key=lambda row: (len(candidates[row]), -row))
        block = min(candidates[row])
        self.on_gpu[row].remove(block)
        return row, block

    def promote(self, count: int, rows: list[int]) -> list[tuple[int, int]]:
        promoted = []
        for row in sorted(rows, key=lambda row: (len(self.on_gpu[row]), row)):
            streaming = sorted(set(range(self.full[row])) - self.on_gpu[row])
            taken = streaming[max(0, len(streaming) - (count - len(promoted))) :]
            self.on_gpu[row].update(taken)
            promoted += [(row, block) for block in taken]
        return promoted


def assert_equal(residency: Residency, naive: Naive) -> None:
    assert (residency.num_resident, residency.num_streamed) == (naive.num_resident, naive.num_streamed)
    for row, blocks in enumerate(naive.on_gpu):
        assert blocks == set(range(residency.first[row], residency.full[row])), f"row {row}"


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_changes_equals_the_model_of_single_blocks(seed):
    generator = random.Random(seed)
    num_rows = generator.choice([1, 2, 5, 9])
    residency, naive = Residency(num_rows), Naive(num_rows)
    num_dropped = num_promoted = num_in_window = 0
    for _ in range(400):
        change = generator.choice(["set", "grow", "clear", "drop", "promote", "promote"])
        row = generator.randrange(num_rows)
        if change == "set":
            full = generator.randint(0, 12)
            values = generator.randint(0, full), full, generator.randint(0, 14)
            residency.set(row, *values)
            naive.set(row, *values)
        elif change == "grow":
            values = int(residency.first[row]), int(residency.full[row]) + 1, int(residency.window[row]) + 1
            residency.set(row, *values)
            naive.set(row, *values)
        elif change == "clear":
            residency.clear(row)
            naive.set(row, 0, 0, 0)
        elif change == "drop":
            count = generator.randint(0, naive.num_resident)
            wanted = [naive.drop_one() for _ in range(count)]
            num_in_window += sum(block >= naive.window[row] for row, block in wanted)
            assert residency.drop(count) == wanted
            num_dropped += count
        else:
            rows = generator.sample(range(num_rows), generator.randint(0, num_rows))
            count = generator.randint(1, 10)
            wanted = naive.promote(count, rows)
            assert residency.promote(count, rows) == wanted and len(wanted) <= count
            num_promoted += len(wanted)
        assert_equal(residency, naive)
    assert num_dropped > 20 and num_promoted > 20 and num_in_window > 5


def test_the_blocks_of_every_window_go_last_and_the_fullest_row_gives_first():
    residency = Residency(3)
    residency.set(0, 0, 6, window=4)
    residency.set(1, 0, 3, window=3)
    residency.set(2, 0, 4, window=0)  # a sequence that its window covers
    outside = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2)]
    inside = [(2, 0), (2, 1), (0, 4), (2, 2), (0, 5), (2, 3)]
    assert residency.drop(len(outside)) == outside
    assert residency.drop(len(inside)) == inside
    assert (residency.num_resident, residency.num_streamed) == (0, 13)


def test_a_drop_and_a_promotion_undo_each_other():
    residency = Residency(2)
    residency.set(0, 0, 5, 5)
    residency.set(1, 2, 4, 4)
    dropped = residency.drop(4)
    assert sorted(residency.promote(4, [0, 1])) == sorted(dropped)
    assert (residency.num_resident, residency.num_streamed) == (7, 2)


def test_only_the_rows_that_were_asked_for_are_promoted():
    residency = Residency(3)
    for row in range(3):
        residency.set(row, 4, 4, 4)
    assert residency.promote(6, [2, 0]) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert residency.promote(9, []) == [] and residency.first.tolist() == [0, 4, 2]


def test_more_than_there_is_cannot_be_dropped():
    residency = Residency(1)
    residency.set(0, 1, 3, 3)
    with pytest.raises(AssertionError, match="3 blocks to drop, 2 are there"):
        residency.drop(3)
