"""Divide the bytes that a step streams among its parts."""

from __future__ import annotations

import numpy as np

from nanoinfer.execution.splits import shares
from offload import KVLayout, StreamPlan


def stream_shares(
    windows: tuple[int | None, ...], layout: KVLayout, num_parts: int, plan: StreamPlan, readers: list[tuple]
) -> np.ndarray | None:
    """Return each part's share of the bytes, [num_parts] int64; readers of one block share it equally.

    Args:
        windows: the window of each layer.
        readers: for each window two parallel arrays, the number of a part and a host block that it reads.

    Returns:
        None if nothing streams.
    """
    total = None
    for window, (numbers, blocks) in zip(dict.fromkeys(windows), readers, strict=True):
        streamed = plan.blocks(windows.index(window))
        if streamed:
            block_bytes = windows.count(window) * layout.layer_block_bytes
            found = shares(streamed, numbers, blocks, num_parts, block_bytes)
            total = found if total is None else total + found
    return total
