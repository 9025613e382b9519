"""KV blocks in pageable host memory, taken from the system only while somebody needs them."""

from __future__ import annotations

from bisect import bisect_right

import torch

from offload.blocks import BlockPool
from offload.layout import KVLayout


class PageablePool:
    """Blocks of whole sequences that gave way: they move to the host and come back unchanged.

    Args:
        max_bytes: the most memory that the pool takes; None: as much as the system gives.

    Attributes:
        blocks: who holds which block. Memory is taken by `reserve` and given back by `trim`.
    """

    def __init__(self, layout: KVLayout, max_bytes: int | None = None) -> None:
        self.layout = layout
        self.max_bytes = max_bytes
        self.blocks = BlockPool(0)
        # The number of each segment's first block, and [num_layers, blocks, 2, block_size, num_kv_heads, head_dim].
        self._segments: list[tuple[int, torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the system."""
        return sum(segment.nbytes for _, segment in self._segments)

    def reserve(self, count: int) -> None:
        """Take as much memory as is missing for `count` free blocks.

        Raises:
            MemoryError: the limit or the system does not allow it; nothing changes.
        """
        missing = count - self.blocks.num_free
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
        self._segments.append((self.blocks.num_blocks, segment))
        self.blocks.grow(missing)

    def trim(self) -> None:
        """Give all memory back if nobody holds a block."""
        if not self.blocks.num_used:
            self.blocks, self._segments = BlockPool(0), []

    def block(self, layer: int, block: int) -> torch.Tensor:
        """`[2, block_size, num_kv_heads, head_dim]` view of one block."""
        first, segment = self._segments[bisect_right(self._segments, block, key=lambda pair: pair[0]) - 1]
        return segment[layer, block - first]
