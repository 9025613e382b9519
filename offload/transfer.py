"""What passes through the ring: bytes of the host, whoever wants them on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from offload.layout import KVLayout
from offload.memory.host_pool import HostPool


class Transfer(Protocol):
    """Bytes that pass through one ring slot together.

    Two that are equal bring the same bytes: what was fetched ahead for the next step is kept if it is equal to what
    that step wants.

    Attributes:
        host_blocks: blocks of the host pool that are among them. What was fetched ahead is dropped when one of them is
            released.
    """

    @property
    def host_blocks(self) -> tuple[int, ...]: ...

    def num_bytes(self, layout: KVLayout) -> int:
        """How many; no more than a ring slot has."""
        ...

    def copies(self, layer: int, slot: torch.Tensor, host: HostPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(destination, source) of each copy, of equal shapes; slot: the ring slot, [bytes] uint8."""
        ...
