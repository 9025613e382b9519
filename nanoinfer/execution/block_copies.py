"""What the engine does to whole blocks, and to states, between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nanoinfer.execution.states import States
from offload import OffloadEngine
from offload.blocks import GPU, HOST


class BlockCopies:
    """Does to blocks and states what the planning side asks for by their numbers; see `nanoinfer.kv.mover.BlockMemory`.

    Args:
        offload: has the host pool, and the streams.
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool.
        states: what sequences keep besides blocks.

    Attributes:
        kept_states: sequence that gave way -> its state, on the host.
    """

    def __init__(self, offload: OffloadEngine, gpu_kv: torch.Tensor, states: States) -> None:
        self._offload, self._runtime, self._places = offload, offload.runtime, range(offload.layout.num_places)
        self._gpu_kv, self._states = gpu_kv, states
        self.kept_states: dict[int, torch.Tensor] = {}

    def borrow(self, num_blocks: int) -> list[int]:
        return self._offload.host.borrow(num_blocks)

    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        self._offload.host.give_back_all_but(blocks)

    def keep_state(self, slot: int, sequence_id: int) -> None:
        if self._states.of_layer:
            self._runtime.synchronize()
            self.kept_states[sequence_id] = self._states.pool[slot].to("cpu", copy=True)

    def bring_state_back(self, slot: int, sequence_id: int) -> None:
        # A sequence that gave way before its first token has nothing kept: its state begins at zero.
        kept = self.kept_states.get(sequence_id)
        if kept is not None:
            self._runtime.synchronize()
            self._states.pool[slot].copy_(kept)

    def forget_state(self, sequence_id: int) -> None:
        self.kept_states.pop(sequence_id, None)

    def forget_other_states(self, sequence_ids: set[int]) -> None:
        for sequence_id in self.kept_states.keys() - sequence_ids:
            self.forget_state(sequence_id)

    def let_go(self, pool: str, blocks: list[int]) -> None:
        """Have blocks be free, which nobody can reach any more: overwritten where the runtime poisons, and given back
        where they were borrowed."""
        for block in blocks if self._runtime.poisons else []:
            stream = self._offload.write if pool == HOST else self._offload.compute
            for place in self._places:
                memory = self._gpu_kv[place, block] if pool == GPU else self._offload.host.block(place, block)
                self._runtime.poison(stream, memory)
        if pool == HOST:
            self._offload.host.give_back(blocks)
