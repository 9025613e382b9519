"""KV of a preempted sequence: it moves to plain host memory and comes back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.layout import KVLayout


@dataclass(frozen=True)
class SavedKV:
    """Blocks in host memory.

    Attributes:
        blocks: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`, CPU.
    """

    blocks: torch.Tensor

    @staticmethod
    def save(layout: KVLayout, gpu_kv: torch.Tensor, blocks: list[int]) -> SavedKV:
        """Copies blocks of the GPU pool; nothing may still be writing them.

        Raises:
            MemoryError: the host has no room for them.
        """
        try:
            saved = torch.empty(layout.pool_shape(len(blocks)), dtype=layout.dtype)
        except RuntimeError as error:
            raise MemoryError(f"no host memory for the KV of a preempted sequence ({error})") from error
        for place, block in enumerate(blocks):
            saved[:, place].copy_(gpu_kv[:, block])
        return SavedKV(saved)

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]

    def restore(self, first: int, last: int, target: Callable[[int, int], torch.Tensor]) -> None:
        """Copies blocks [first, last) to `target(layer, place)`, each `[2, block_size, num_kv_heads, head_dim]`."""
        for place in range(first, last):
            for layer in range(len(self.blocks)):
                target(layer, place).copy_(self.blocks[layer, place])
