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
        gpu_kv: `[num_layers, num_gpu_blocks, part_bytes]`, the GPU pool.
        kept: the pageable blocks.
        states: what rows keep besides blocks.

    Attributes:
        kept_rows: sequence that gave way -> what its row had besides blocks, on the host.
    """

    def __init__(
        self, offload: OffloadEngine, gpu_kv: torch.Tensor, kept: PageablePool, states: RecurrentStates
    ) -> None:
        self._offload, self._runtime, self._layers = offload, offload.runtime, range(offload.layout.num_layers)
        self._gpu_kv, self._kept, self._states = gpu_kv, kept, states.of_layer.values()
        self.kept_rows: dict[int, list[torch.Tensor]] = {}

    def _block(self, pool: str, layer: int, block: int) -> torch.Tensor:
        """Return a view of a layer's part of a block of the pool of this name, `[part_bytes]`."""
        if pool == GPU:
            return self._gpu_kv[layer, block]
        return (self._kept if pool == KEPT else self._offload.host).block(layer, block)

    def reserve(self, num_blocks: int) -> None:
        self._kept.reserve(num_blocks)

    def trim(self) -> None:
        self._kept.trim()
        self.kept_rows.clear()

    def copy(self, source: str, destination: str, pairs: list[tuple[int, int]]) -> None:
        """Wait for all streams, then copy between two pools, one of which at least lies on the host.

        Afterwards the copies have run: torch waits for a copy between host and GPU unless it is `non_blocking`.
        """
        self._runtime.synchronize()
        for layer in self._layers:
            for read, written in pairs:
                self._block(destination, layer, written).copy_(self._block(source, layer, read))

    def keep_row(self, row: int, sequence_id: int) -> None:
        self.kept_rows[sequence_id] = [states[row].to("cpu", copy=True) for states in self._states]

    def bring_row_back(self, row: int, sequence_id: int) -> None:
        self._runtime.synchronize()
        # A sequence that gave way before its first token has nothing kept: its states begin at zero.
        for states, kept in zip(self._states, self.kept_rows.get(sequence_id, ())):
            states[row].copy_(kept)

    def forget_row(self, sequence_id: int) -> None:
        self.kept_rows.pop(sequence_id, None)

    def forget_other_rows(self, sequence_ids: set[int]) -> None:
        for sequence_id in self.kept_rows.keys() - sequence_ids:
            self.forget_row(sequence_id)

    def poison(self, pool: str, blocks: list[int]) -> None:
        for block in blocks if self._runtime.poisons else []:
            stream = self._offload.write if pool == HOST else self._offload.compute
            for layer in self._layers:
                self._runtime.poison(stream, self._block(pool, layer, block))
