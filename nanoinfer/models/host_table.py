"""The embedding table, or the head, in host memory.

Of the table the GPU reads the rows of a step's tokens where they lie: only it knows which. Each step that samples reads
all of a head, also of one that is tied to the table: it passes to the GPU in slices (`streamed_head.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from nanoinfer.devices.registry import device_of
from nanoinfer.models.module_tensors import aligned_begins, move_tensors
from offload.memory.pinned import HostArena


class HostTable:
    """A module whose tensors, allocated on the CPU and not filled, go to pinned host memory.

    Args:
        device: to which they pass.
        is_read: whether its kernels read them where they lie.
    """

    def __init__(self, module: nn.Module, device: torch.device, is_read: bool = True) -> None:
        self.module, self._device, self._is_read = module, device, is_read
        self._begins, self.num_bytes = aligned_begins(module)
        self.arena: HostArena | None = None

    def open(self, remedy: str, require_pin: bool = False, may_pin: bool = True) -> None:
        """Give the tensors their memory.

        require_pin: also where no kernel reads it; may_pin: whether the system is asked, if none does.

        Raises:
            MemoryError: there is not as much host memory.
            PinError: the system refused to pin it, and the GPU reads no other.
        """
        pinner = device_of(self._device).pinner if may_pin or self._is_read else None
        options = dict(require_pin=require_pin or self._is_read, remedy=remedy)
        self.arena = HostArena(1, self.num_bytes, pinner=pinner, **options)
        self.arena.wait()
        move_tensors(self.module, self._begins, self.arena.segment(0))

    def close(self) -> None:
        """Give it back, once nothing holds the tensors."""
        if self.arena is not None:
            self.arena.close()
