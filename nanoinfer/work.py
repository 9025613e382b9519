"""Turns the block tables of a batch into lists of splits: which lie on the GPU, and which stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoinfer.kv_cache import NO_BLOCK
from offload import Chunk


@dataclass(frozen=True)
class SplitLists:
    """The splits that one decode step attends to, for layers of one window.

    Attributes:
        on_gpu: [n, 4] int32, (batch row, split, GPU block, partial index).
        on_host: [m, 4] int32, (batch row, split, host block, partial index), in the order in which they stream: that of
            the host pool, where neighbours pass in one copy, whoever they belong to.
        ranges: [batch + 1] int32: row b's partials are ranges[b] to ranges[b + 1] - 1, in ascending order of split.
    """

    on_gpu: np.ndarray
    on_host: np.ndarray
    ranges: np.ndarray


def first_visible_block(query_position: int | np.ndarray, window: int | None, block_size: int) -> int | np.ndarray:
    """The first block with a key that a query sees: keys j with query_position - window < j."""
    if window is None:
        return query_position * 0
    return np.maximum(query_position - window + 1, 0) // block_size


def split_lists(
    gpu_rows: np.ndarray, host_rows: np.ndarray, lengths: np.ndarray, window: int | None, block_size: int
) -> SplitLists:
    """Lists the splits of a decode batch.

    Args:
        gpu_rows, host_rows: [batch, max_blocks] int32, the rows' block tables; -1 where there is no block.
        lengths: [batch] tokens of each row, the current one included.
        window: the layers' sliding window in tokens, None for full attention.
    """
    first = first_visible_block(lengths - 1, window, block_size)
    counts = -(-lengths // block_size) - first
    ranges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    partial = np.arange(ranges[-1])
    row = np.repeat(np.arange(len(lengths)), counts)
    split = partial - np.repeat(ranges[:-1], counts) + np.repeat(first, counts)
    gpu_block, host_block = gpu_rows[row, split], host_rows[row, split]
    is_on_gpu = gpu_block != NO_BLOCK
    assert np.all(is_on_gpu | (host_block != NO_BLOCK)), "a split lies neither on the GPU nor on the host"
    on_gpu = np.stack([row, split, gpu_block, partial], axis=1)[is_on_gpu]
    on_host = np.stack([row, split, host_block, partial], axis=1)[~is_on_gpu]
    on_host = on_host[np.argsort(on_host[:, 2], kind="stable")]
    return SplitLists(on_gpu.astype(np.int32), on_host.astype(np.int32), ranges)


def slot_records(on_host: np.ndarray, chunks: list[Chunk], blocks_per_slot: int) -> np.ndarray:
    """What attention must know of each chunk once it lies in a ring slot.

    Returns:
        [len(chunks), 4 + 4 * blocks_per_slot] int32: (number of items, 0, 0, 0), then the items with the host block
        replaced by the place in the ring slot.
    """
    records = np.zeros((len(chunks), 4 + 4 * blocks_per_slot), dtype=np.int32)
    for record, chunk in zip(records, chunks, strict=True):
        count = len(chunk.blocks)
        items = on_host[chunk.begin : chunk.begin + count].copy()
        items[:, 2] = np.arange(count)
        record[0] = count
        record[4 : 4 + 4 * count] = items.reshape(-1)
    return records
