"""Count what the sequences of a step read, and what streams for each of them."""

from __future__ import annotations

from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.splits import shares
from nanoinfer.requests.sequence import Sequence
from offload import KVLayout, StreamPlan


def count_blocks_read(kv_cache: KVCache, sequences: list[Sequence]) -> None:
    """Add to each sequence's counts how many full blocks the step reads, and how many of them lie on the GPU."""
    if kv_cache.offload is None:
        return
    for sequence in sequences:
        first, full = int(kv_cache.residency.first[sequence.row]), int(kv_cache.residency.full[sequence.row])
        sequence.num_blocks_read += full
        sequence.num_resident_read += full - first


def count_streamed(
    windows: tuple[int | None, ...], layout: KVLayout, sequences: list[Sequence], plan: StreamPlan, readers: list[tuple]
) -> None:
    """Add to each sequence its share of the bytes that the step streams; readers of one block share it equally.

    Args:
        windows: the window of each layer.
        readers: for each window two parallel arrays, the number of a sequence and a host block that it reads.
    """
    for window, (numbers, blocks) in zip(dict.fromkeys(windows), readers, strict=True):
        streamed = plan.blocks(windows.index(window))
        if not streamed:
            continue
        block_bytes = windows.count(window) * layout.layer_block_bytes
        parts = shares(streamed, numbers, blocks, len(sequences), block_bytes)
        for sequence, num_bytes in zip(sequences, parts.tolist(), strict=True):
            sequence.streamed_bytes += num_bytes
