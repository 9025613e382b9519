"""Copies of whole KV blocks between two steps, and poison for blocks that nobody holds."""

from __future__ import annotations

import torch

from offload import KVLayout, OffloadEngine, Runtime, Stream
from offload.memory.pageable_pool import PageablePool


class BlockCopies:
    """Does to blocks what the planning side asks for by their numbers (see `nanoinfer.kv.mover.BlockCopier`).

    Args:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        kept: the pageable blocks.
    """

    def __init__(
        self, runtime: Runtime, compute: Stream, layout: KVLayout, gpu_kv: torch.Tensor, kept: PageablePool
    ) -> None:
        self._runtime, self._compute, self._layout = runtime, compute, layout
        self._gpu_kv, self._kept = gpu_kv, kept

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        """Copy GPU blocks to pageable blocks: (GPU block, pageable block). Waits for all streams before and after."""
        self._runtime.synchronize()
        for layer in range(self._layout.num_layers):
            for on_gpu, on_host in pairs:
                self._kept.block(layer, on_host).copy_(self._gpu_kv[layer, on_gpu])
        self._runtime.synchronize()

    def to_gpu(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pageable blocks to GPU blocks: (GPU block, pageable block). Waits for all streams before and after."""
        self._runtime.synchronize()
        for layer in range(self._layout.num_layers):
            for on_gpu, on_host in pairs:
                self._gpu_kv[layer, on_gpu].copy_(self._kept.block(layer, on_host))
        self._runtime.synchronize()

    def to_pool(self, pairs: list[tuple[int, int]], offload: OffloadEngine) -> None:
        """Copy pageable blocks to blocks of the host pool: (block of the host pool, pageable block)."""
        self._runtime.synchronize()
        for layer in range(self._layout.num_layers):
            for in_pool, on_host in pairs:
                offload.host.block(layer, in_pool).copy_(self._kept.block(layer, on_host))

    def poison(self, blocks: list[int]) -> None:
        """Overwrite GPU blocks that nobody holds any more, in runtimes that look for wrong reads."""
        for block in blocks if self._runtime.poisons else []:
            for layer in range(self._layout.num_layers):
                self._runtime.poison(self._compute, self._gpu_kv[layer, block])
