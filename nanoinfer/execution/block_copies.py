"""Copies of whole KV blocks between two steps, and poison for blocks that nobody holds."""

from __future__ import annotations

import torch

from nanoinfer.execution.recurrent import RecurrentStates
from offload import KVLayout, OffloadEngine, Runtime, Stream
from offload.blocks import GPU, HOST, KEPT
from offload.memory.pageable_pool import PageablePool


class BlockCopies:
    """Does to blocks and rows what the planning side asks for by their numbers.

    What the methods do is said in `nanoinfer.kv.mover.BlockCopier` and `offload.lifetimes.Acknowledgements`.

    Args:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        kept: the pageable blocks.
        states: what rows keep besides blocks.

    Attributes:
        offload: the pinned blocks and their copies; set once offload mode is possible.
    """

    def __init__(
        self,
        runtime: Runtime,
        compute: Stream,
        layout: KVLayout,
        gpu_kv: torch.Tensor,
        kept: PageablePool,
        states: RecurrentStates,
    ) -> None:
        self._runtime, self._compute, self._layout = runtime, compute, layout
        self._gpu_kv, self._kept, self._states = gpu_kv, kept, states
        self.offload: OffloadEngine | None = None

    def _block(self, pool: str, layer: int, block: int) -> torch.Tensor:
        """`[2, block_size, num_kv_heads, head_dim]` view of a block of the pool of this name."""
        if pool == GPU:
            return self._gpu_kv[layer, block]
        return (self._kept if pool == KEPT else self.offload.host).block(layer, block)

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
        for layer in range(self._layout.num_layers):
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

    def check_pool(self) -> None:
        self.offload.host.check()

    def store(self, pairs: list[tuple[int, int]], operation: int) -> None:
        self.offload.store(pairs, operation)

    def load(self, pairs: list[tuple[int, int]]) -> None:
        self.offload.load(pairs)

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        return self.offload.has_run(kind, operation, rule)

    def wait(self, kind: str, operation: int, rule: str) -> None:
        self.offload.wait(kind, operation, rule)

    def drain(self) -> None:
        self.offload.drain()

    def recover(self, operation: int) -> None:
        if self.offload is not None:
            self.offload.recover(operation)

    def poison(self, pool: str, blocks: list[int]) -> None:
        """Overwrite blocks of a pool that nobody holds any more, in runtimes that look for wrong reads."""
        for block in blocks if self._runtime.poisons else []:
            stream = self.offload.write if pool == HOST else self._compute
            for layer in range(self._layout.num_layers):
                self._runtime.poison(stream, self._block(pool, layer, block))
