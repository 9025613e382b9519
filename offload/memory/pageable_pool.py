"""KV blocks in pageable host memory, taken from the system only while somebody needs them."""

from __future__ import annotations

import torch

from offload.layout import KVLayout


class PageablePool:
    """Memory of blocks of sequences that gave way: their KV moves to the host and comes back unchanged.

    Who holds which block is counted elsewhere; blocks are numbered from 0.

    Args:
        max_bytes: the most memory that the pool takes; None: as much as the system gives.
    """

    def __init__(self, layout: KVLayout, max_bytes: int | None = None) -> None:
        self.layout, self.max_bytes = layout, max_bytes
        self._blocks: list[torch.Tensor] = []  # each [num_layers, part_bytes] uint8

    @property
    def num_blocks(self) -> int:
        """Blocks for which there is memory."""
        return len(self._blocks)

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
            blocks = torch.empty((missing, self.layout.num_layers, self.layout.part_bytes), dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"no host memory for the KV of a preempted sequence ({error})") from error
        self._blocks += blocks.unbind()

    def trim(self) -> None:
        """Give all memory back."""
        self._blocks = []

    def block(self, layer: int, block: int) -> torch.Tensor:
        """Return a view of one layer's part of a block, `[part_bytes]`."""
        return self._blocks[block][layer]
