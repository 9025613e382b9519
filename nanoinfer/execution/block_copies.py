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
        self.offload: OffloadEngine | None = None  # set once offload mode is possible

    def reserve(self, num_blocks: int) -> None:
        """Make room for `num_blocks` pageable blocks in all. Raise MemoryError if there is none."""
        self._kept.reserve(num_blocks)

    def trim(self) -> None:
        """Give the memory of all pageable blocks back."""
        self._kept.trim()

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

    def to_pool(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pageable blocks to blocks of the host pool: (block of the host pool, pageable block)."""
        self._runtime.synchronize()
        for layer in range(self._layout.num_layers):
            for in_pool, on_host in pairs:
                self.offload.host.block(layer, in_pool).copy_(self._kept.block(layer, on_host))

    def check_pool(self) -> None:
        """Raise PinError if the host pool cannot be used."""
        self.offload.host.check()

    def store(self, pairs: list[tuple[int, int]], operation: int) -> None:
        """Begin to copy (GPU block, block of the host pool) pairs to the host, as this operation."""
        self.offload.store(pairs, operation)

    def load(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (GPU block, block of the host pool) pairs to the GPU."""
        self.offload.load(pairs)

    def drain(self) -> None:
        """Wait until no copy is in flight, and drop what was prefetched."""
        self.offload.drain()

    def recover(self, operation: int) -> None:
        """Forget every copy up to this operation. Nothing is in flight."""
        self.offload.recover(operation)

    def poison(self, blocks: list[int]) -> None:
        """Overwrite GPU blocks that nobody holds any more, in runtimes that look for wrong reads."""
        for block in blocks if self._runtime.poisons else []:
            for layer in range(self._layout.num_layers):
                self._runtime.poison(self._compute, self._gpu_kv[layer, block])
