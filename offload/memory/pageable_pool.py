"""KV blocks in pageable host memory, taken from the system only while somebody needs them."""

from __future__ import annotations

from bisect import bisect_right

import torch

from offload.layout import KVLayout


class PageablePool:
    """Memory of blocks of sequences that gave way: their KV moves to the host and comes back unchanged.

    Who holds which block is counted elsewhere; blocks are numbered from 0.

    Args:
        max_bytes: the most memory that the pool takes; None: as much as the system gives.
    """

    def __init__(self, layout: KVLayout, max_bytes: int | None = None) -> None:
        self.layout = layout
        self.max_bytes = max_bytes
        # The number of each segment's first block, and [num_layers, blocks, 2, block_size, num_kv_heads, head_dim].
        self._segments: list[tuple[int, torch.Tensor]] = []

    @property
    def num_blocks(self) -> int:
        """Blocks for which there is memory."""
        return sum(segment.shape[1] for _, segment in self._segments)

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the system."""
        return self.num_blocks * self.layout.block_bytes

    def reserve(self, num_blocks: int) -> None:
        """Take as much memory as is missing for `num_blocks` blocks in all.

        Raises:
            MemoryError: the limit or the system does not allow it; nothing changes.
        """
        missing = num_blocks - self.num_blocks
        if missing <= 0:
            return
        wanted = missing * self.layout.block_bytes
        if self.max_bytes is not None and self.num_bytes + wanted > self.max_bytes:
            raise MemoryError(
                f"no host memory for the KV of a preempted sequence: {wanted} more bytes would be above "
                f"host_memory_limit ({self.max_bytes} bytes, {self.num_bytes} are taken): raise it"
            )
        try:
            segment = torch.empty(self.layout.pool_shape(missing), dtype=self.layout.dtype)
        except RuntimeError as error:
            raise MemoryError(f"no host memory for the KV of a preempted sequence ({error})") from error
        self._segments.append((self.num_blocks, segment))

    def trim(self) -> None:
        """Give all memory back."""
        self._segments = []

    def block(self, layer: int, block: int) -> torch.Tensor:
        """`[2, block_size, num_kv_heads, head_dim]` view of one block."""
        first, segment = self._segments[bisect_right(self._segments, block, key=lambda pair: pair[0]) - 1]
        return segment[layer, block - first]
