"""Divide the bytes that a step streams among its members."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offload import Chunk, KVLayout


def stream_shares(
    layout: KVLayout,
    num_layers: Sequence[int],
    num_members: int,
    chunks: Sequence[Sequence[Chunk]],
    readers: Sequence[tuple[np.ndarray, np.ndarray]],
    common_bytes: int,
) -> np.ndarray:
    """Return each member's share of the bytes that a step streams, [num_members] int64.

    Readers of one block share it equally; so do all members what no row reads alone.

    Args:
        num_layers, chunks, readers: for each group how many layers read it, their KV chunks, and two parallel arrays,
            the number of a member and a host block that it reads.
        common_bytes: what passes besides KV.
    """
    total = np.full(num_members, common_bytes // num_members)
    total[0] += common_bytes % num_members
    for layers, passing, (numbers, blocks) in zip(num_layers, chunks, readers, strict=True):
        streamed = [block for chunk in passing for block in chunk.blocks]
        total += shares(streamed, numbers, blocks, num_members, layers * layout.part_bytes)
    return total


def shares(streamed: list[int], numbers: np.ndarray, blocks: np.ndarray, count: int, block_bytes: int) -> np.ndarray:
    """Divide the streamed bytes among the sequences: each block's bytes equally among those that read it.

    Args:
        streamed: the blocks that pass, each as often as it passes.
        numbers, blocks: a sequence's number, below `count`, and a block that it reads, for each such pair.

    Returns:
        [count] int64 bytes, which add up to those of the stream.
    """
    passing, times = np.unique(np.array(streamed, dtype=np.int64), return_counts=True)
    at = np.searchsorted(passing, blocks)
    num_readers = np.bincount(at, minlength=len(passing))
    num_bytes = times * block_bytes
    each = (num_bytes // num_readers)[at]
    _, first_reader = np.unique(at, return_index=True)
    each[first_reader] += num_bytes % num_readers
    return np.bincount(numbers, weights=each, minlength=count).astype(np.int64)
