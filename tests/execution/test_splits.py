"""The lists of splits of a decode step."""

from types import SimpleNamespace

import numpy as np
import pytest

from nanoinfer.execution.splits import SplitPlanner, slot_records, split_lists
from nanoinfer.execution.stream_shares import shares
from offload import Chunk, pack
from offload.groups import KVGroup

BLOCK_SIZE = 16


def make_lists(lengths, window, splits, seed):
    generator = np.random.default_rng(seed)
    width = -(-max(lengths) // BLOCK_SIZE)
    gpu = generator.permutation(1000)[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
    host = generator.permutation(1000)[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
    on_host = generator.random(gpu.shape) < 0.5
    gpu[on_host], host[~on_host] = -1, -1
    asked = []

    def cut(num_blocks):
        asked.append(num_blocks.tolist())
        return splits

    return gpu, host, split_lists(gpu, host, np.array(lengths), window, BLOCK_SIZE, cut), asked


@pytest.mark.parametrize("splits", [[1] * 7, [4] * 7, [4, 1, 2, 4, 1, 2, 1]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_each_visible_key_is_in_one_split_and_the_partials_of_a_row_ascend(window, splits):
    lengths, splits = [1, 4, 5, 16, 17, 40, 64], np.array(splits)
    for seed in range(20):
        gpu, host, lists, asked = make_lists(lengths, window, splits, seed)
        assert np.array_equal(lists.partials_per_block, splits)
        chunks = [
            Chunk(begin=i, blocks=tuple(lists.on_host[i : i + 3, 2].tolist())) for i in range(0, len(lists.on_host), 3)
        ]
        records = slot_records(lists.on_host, chunks)
        assert all(record.shape[1:] == (4,) for record in records)
        found = [(row, split, ("gpu", block), partial) for row, split, block, partial in lists.on_gpu.tolist()]
        for record, chunk in zip(records, chunks, strict=True):
            count = record[0, 0]
            assert not record[0, 1:].any() and not record[1 + count :].any()
            found += [(row, s, ("host", chunk.blocks[at]), p) for row, s, at, p in record[1 : 1 + count].tolist()]
        assert sorted(p for *_, p in found) == list(range(lists.ranges[-1]))
        seen = {row: [] for row in range(len(lengths))}
        blocks = set()
        for row, split, place, partial in sorted(found, key=lambda item: item[3]):
            assert lists.ranges[row] <= partial < lists.ranges[row + 1]
            index, span = split // splits[row], BLOCK_SIZE // splits[row]
            blocks.add((row, index))
            assert place == (("host", host[row, index]) if gpu[row, index] == -1 else ("gpu", gpu[row, index]))
            seen[row] += range(split * span, min((split + 1) * span, lengths[row]))
        for row, length in enumerate(lengths):
            first = 0 if window is None else max(0, length - window)
            assert seen[row] == sorted(set(seen[row])), "partials do not ascend, or a key is seen twice"
            assert seen[row][-1] == length - 1 and seen[row][0] <= first
            assert all(key < length for key in seen[row]) and lists.ranges[row + 1] > lists.ranges[row]
        num_keys = [
            sum(
                0 <= key // (BLOCK_SIZE // splits[row]) - split < 1
                for key in range(max(0, length - (window or length)), length)
            )
            for row, split, *_ in lists.on_gpu.tolist()
            for length in [lengths[row]]
        ]
        assert num_keys == sorted(num_keys, reverse=True), "the longest come first"
        assert asked == [[sum(row == r for r, _ in blocks) for row in range(len(lengths))]]


@pytest.mark.parametrize("splits", [[1] * 4, [2, 4, 1, 2]], ids=str)
def test_rows_that_share_a_block_have_an_item_each_and_stream_it_once(splits):
    generator = np.random.default_rng(0)
    lengths = np.array([90, 70, 33, 64])
    host = generator.permutation(40)[:24].reshape(4, 6).astype(np.int32)
    host[1, :3] = host[0, :3]
    host[3, :3] = host[0, :3]
    host[2, 1] = host[0, 1]  # behind a block of its own
    gpu = np.full_like(host, -1)
    gpu[3, 2:] = [5, 6, 7, 8]
    lists = split_lists(gpu, host, lengths, None, BLOCK_SIZE, lambda counts: np.array(splits))
    counts = -(-lengths // BLOCK_SIZE)
    wanted = {(row, i) for row, count in enumerate(counts) for i in range(count) if gpu[row, i] < 0}
    assert lists.host_blocks.tolist() == sorted({int(host[place]) for place in wanted})
    beside = Chunk((77, int(host[0, 1]), 78), 0, "a prompt's")
    own = pack(np.setdiff1d(lists.host_blocks, beside.blocks), 3)
    chunks = [*own, beside]
    found = set()
    for record, chunk in zip(slot_records(lists.on_host, chunks), chunks, strict=True):
        assert len(record) == 1 + record[0, 0]
        for row, split, place, partial in record[1:].tolist():
            index = split // splits[row]
            assert chunk.blocks[place] == host[row, index]
            found.add((row, index))
            # The partials are those that the row would have alone.
            assert partial == lists.ranges[row] + split
    assert found == wanted
    assert {row for row, *_ in slot_records(lists.on_host, chunks)[-1][1:].tolist()} == {0, 1, 2, 3}


def test_no_record_is_longer_than_its_place():
    """Rows whose blocks are cut, and rows that share all their blocks."""
    for lengths, splits, blocks_per_slot in (
        ([16 * BLOCK_SIZE], [4], 16),
        ([6 * BLOCK_SIZE, 2 * BLOCK_SIZE], [4, 4], 3),
        ([BLOCK_SIZE * 40] * 5, [1] * 5, 8),
    ):
        host = np.tile(np.arange(max(lengths) // BLOCK_SIZE, dtype=np.int32), (len(lengths), 1))
        gpu, splits = np.full_like(host, -1), np.array(splits)
        lists = split_lists(gpu, host, np.array(lengths), None, BLOCK_SIZE, lambda counts, splits=splits: splits)
        longest = max(record.size for record in slot_records(lists.on_host, pack(lists.host_blocks, blocks_per_slot)))
        assert longest <= 4 + 4 * int(lists.ranges[-1])


def test_a_block_that_lies_in_no_chunk_is_noticed():
    _, _, lists, _ = make_lists([40, 64], None, np.array([1, 1]), 3)
    with pytest.raises(AssertionError, match="lies in no chunk"):
        slot_records(lists.on_host, pack(lists.host_blocks[1:], 2))


def test_shares_add_up_to_what_was_streamed():
    # Block 7 passes once for three, block 9 twice for two, block 4 for one alone.
    numbers, blocks = np.array([0, 1, 2, 0, 1, 2]), np.array([7, 7, 7, 9, 9, 4])
    assert shares([9, 7, 4, 9], numbers, blocks, 4, 100).tolist() == [34 + 100, 33 + 100, 33 + 100, 0]
    assert shares([], np.array([], dtype=int), np.array([], dtype=int), 2, 100).tolist() == [0, 0]
    generator = np.random.default_rng(1)
    for _ in range(30):
        numbers, blocks = generator.integers(0, 5, 40), generator.integers(0, 9, 40)
        streamed = np.repeat(np.unique(blocks), generator.integers(1, 3, len(np.unique(blocks))))
        found = shares(streamed.tolist(), numbers, blocks, 5, 1001)
        assert found.sum() == len(streamed) * 1001 and np.all(found >= 0)


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("window", [None, 20, 33])
def test_a_row_has_its_splits_up_to_the_length_that_is_said_and_no_further(window, tiles):
    """Up to there a step may repeat the one before; with one token more its lists are others."""
    backend, ring = SimpleNamespace(tiles_per_block=tiles), SimpleNamespace(blocks_per_slot=2)
    groups = [KVGroup((0,), window, BLOCK_SIZE)]
    planner = SplitPlanner(SimpleNamespace(groups=groups, backend_of_group=[backend], ring=ring))
    blocks = np.arange(20).reshape(1, 1, 20)

    def splits_of(length):
        (lists,) = planner.splits(1, blocks, blocks * 0 - 1, np.array([length]))
        return sorted(lists.on_gpu.tolist()), lists.ranges.tolist(), lists.partials_per_block.tolist()

    for length in range(1, 200):
        (end,) = planner.valid_up_to(1, np.array([length]))
        are_same = [splits_of(later) == splits_of(length) for later in range(length, end + 2)]
        assert all(are_same[:-1]) and not are_same[-1], (length, end)
