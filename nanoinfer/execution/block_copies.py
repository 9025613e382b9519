"""Copies of whole KV blocks between two steps, and poison for blocks that nobody holds."""

from __future__ import annotations

import torch

from nanoinfer.execution.recurrent import RecurrentStates
from offload import OffloadEngine
from offload.blocks import GPU, HOST, KEPT
from offload.memory.pageable_pool import PageablePool


class BlockCopies:
    """Does to blocks and rows what the planning side asks for by their numbers; see `nanoinfer.kv.mover.BlockCopier`.

    Args:
        offload: has the host pool, and the streams.
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        kept: the pageable blocks.
        states: what rows keep besides blocks.
    """

    def __init__(
        self, offload: OffloadEngine, gpu_kv: torch.Tensor, kept: PageablePool, states: RecurrentStates
    ) -> None:
        self._offload, self._runtime, self._layers = offload, offload.runtime, range(offload.layout.num_layers)
        self._gpu_kv, self._kept, self._states = gpu_kv, kept, states

    def _block(self, pool: str, layer: int, block: int) -> torch.Tensor:
        """`[2, block_size, num_kv_heads, head_dim]` view of a block of the pool of this name."""
        if pool == GPU:
            return self._gpu_kv[layer, block]
        return (self._kept if pool == KEPT else self._offload.host).block(layer, block)

    def reserve(self, num_blocks: int) -> None:
        self._kept.reserve(num_blocks)

    def trim(self) -> None:
        self._kept.trim()
        self._states.kept.clear()

    def copy(self, source: str, destination: str, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks between two pools, given by name; `pairs` are (block of `source`, block of `destination`).

        At least one of the pools lies on the host. Wait for all streams before; the copies have run at the end, because
        torch waits for a copy between host and GPU that is not said to be `non_blocking`.
        """
        self._runtime.synchronize()
        for layer in self._layers:
            for read, written in pairs:
                self._block(destination, layer, written).copy_(self._block(source, layer, read))

    def keep_row(self, row: int, sequence_id: int) -> None:
        """Copy what a row has besides blocks to the host. Nothing is in flight: the `copy` of its blocks has waited."""
        self._states.keep(row, sequence_id)

    def bring_row_back(self, row: int, sequence_id: int) -> None:
        """Copy what `keep_row` has kept of a sequence to its new row. Waits for all streams before."""
        self._runtime.synchronize()
        self._states.bring_back(row, sequence_id)

    def forget_row(self, sequence_id: int) -> None:
        self._states.kept.pop(sequence_id, None)

    def forget_other_rows(self, sequence_ids: set[int]) -> None:
        for sequence_id in self._states.kept.keys() - sequence_ids:
            self.forget_row(sequence_id)

    def poison(self, pool: str, blocks: list[int]) -> None:
        """Overwrite blocks of a pool that nobody holds any more, in runtimes that look for wrong reads."""
        for block in blocks if self._runtime.poisons else []:
            stream = self._offload.write if pool == HOST else self._offload.compute
            for layer in self._layers:
                self._runtime.poison(stream, self._block(pool, layer, block))
