"""The embedding table in host memory. The GPU reads the rows of a step's tokens from there: only it knows which.

Nothing else reads the table where the head has a weight of its own, and a step reads a few rows. A tied head is the
same tensor, of which each step reads all: it stays on the GPU, and counts once.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoinfer.devices.registry import device_of
from nanoinfer.models.module_tensors import ALIGNMENT, move_tensors
from offload.memory.pinned import HostArena


class HostTable:
    """A module whose tensors, allocated on the CPU and not filled, go to pinned host memory.

    Args:
        device: whose kernels read them.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self._device = module, device
        self._begins: dict[int, int] = {}
        self.num_bytes = 0
        for tensor in module.parameters():
            self._begins[tensor.untyped_storage().data_ptr()] = self.num_bytes
            self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.arena: HostArena | None = None

    def open(self, remedy: str) -> None:
        """Give the tensors their memory.

        Raises:
            MemoryError: there is not as much host memory.
            PinError: the system refused to pin it, and the GPU reads no other.
        """
        self.arena = HostArena(
            1, self.num_bytes, pinner=device_of(self._device).pinner, require_pin=True, remedy=remedy
        )
        self.arena.wait()
        move_tensors(self.module, self._begins, self.arena.segment(0))

    def close(self) -> None:
        """Give it back, once nothing holds the tensors."""
        if self.arena is not None:
            self.arena.close()
