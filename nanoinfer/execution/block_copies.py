"""Copies of whole KV blocks between two steps, for preemption; and poison for blocks that nobody holds."""

from __future__ import annotations

import torch

from offload import KVLayout, Runtime, Stream
from offload.memory.saved_kv import SavedKV


class BlockCopies:
    """What the KV cache has done to blocks of the GPU pool by their numbers (see `nanoinfer.kv.cache.GPUBlockCopies`).

    Args:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`.
    """

    def __init__(self, runtime: Runtime, compute: Stream, layout: KVLayout, gpu_kv: torch.Tensor) -> None:
        self._runtime, self._compute, self._layout, self._gpu_kv = runtime, compute, layout, gpu_kv

    def save(self, blocks: list[int]) -> SavedKV:
        self._runtime.synchronize()
        return SavedKV.save(self._layout, self._gpu_kv, blocks)

    def restore(self, saved: SavedKV, first: int, blocks: list[int]) -> None:
        self._runtime.synchronize()
        saved.restore(first, first + len(blocks), lambda layer, place: self._gpu_kv[layer, blocks[place - first]])
        self._runtime.synchronize()

    def poison(self, blocks: list[int]) -> None:
        for block in blocks if self._runtime.poisons else []:
            for layer in range(self._layout.num_layers):
                self._runtime.poison(self._compute, self._gpu_kv[layer, block])
