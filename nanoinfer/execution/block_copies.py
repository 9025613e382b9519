"""What becomes of blocks, and of slots for states, that nobody holds any more; and blocks that are borrowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nanoinfer.execution.states import States
from offload import OffloadEngine
from offload.blocks import GPU, HOST, STATES


class BlockCopies:
    """Does to blocks and slots what the planning side asks for by their numbers (`nanoinfer.step.executor.Executor`).

    Args:
        offload: has the host pool, and the streams.
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool.
        states: what sequences keep besides blocks.
    """

    def __init__(self, offload: OffloadEngine, gpu_kv: torch.Tensor, states: States) -> None:
        self._offload, self._runtime, self._places = offload, offload.runtime, range(offload.layout.num_places)
        self._gpu_kv, self._states = gpu_kv, states

    def borrow(self, num_blocks: int) -> list[int]:
        return self._offload.host.borrow(num_blocks)

    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        self._offload.host.give_back_all_but(blocks)

    def let_go(self, pool: str, blocks: list[int]) -> None:
        """Have blocks be free, which nobody can reach any more: overwritten where the runtime poisons, and given back
        where they were borrowed."""
        if pool == STATES:
            for slot in blocks:
                self._runtime.poison(self._offload.compute, self._states.pool[slot])
            return
        for block in blocks if self._runtime.poisons else []:
            stream = self._offload.write if pool == HOST else self._offload.compute
            for place in self._places:
                memory = self._gpu_kv[place, block] if pool == GPU else self._offload.host.block(place, block)
                self._runtime.poison(stream, memory)
        if pool == HOST:
            self._offload.host.give_back(blocks)
