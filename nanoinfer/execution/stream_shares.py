"""Divide the bytes that a step streams among its members."""

from __future__ import annotations

import numpy as np

from offload import KVLayout, StreamPlan


def stream_shares(
    kind: list[int], layout: KVLayout, num_members: int, plan: StreamPlan, readers: list[tuple]
) -> np.ndarray:
    """Return each member's share of the bytes, [num_members] int64; readers of one block share it equally.

    Args:
        kind: as in `Resources`.
        readers: for each kind two parallel arrays, the number of a member and a host block that it reads.
    """
    return sum(
        shares(plan.blocks(kind.index(i)), numbers, blocks, num_members, kind.count(i) * layout.layer_block_bytes)
        for i, (numbers, blocks) in enumerate(readers)
    )


def shares(streamed: list[int], numbers: np.ndarray, blocks: np.ndarray, count: int, block_bytes: int) -> np.ndarray:
    """Divide the streamed bytes among the sequences: each block's bytes equally among those that read it.

    Args:
        streamed: the blocks that pass, each as often as it passes.
        numbers, blocks: a sequence's number, below `count`, and a block that it reads, for each such pair.

    Returns:
        [count] int64 bytes, which add up to those of the stream.
    """
    found, times = np.unique(np.array(streamed, dtype=np.int64), return_counts=True)
    at = np.searchsorted(found, blocks)
    num_readers = np.bincount(at, minlength=len(found))
    num_bytes = times * block_bytes
    each = (num_bytes // num_readers)[at]
    _, first_reader = np.unique(at, return_index=True)
    each[first_reader] += num_bytes % num_readers
    return np.bincount(numbers, weights=each, minlength=count).astype(np.int64)
