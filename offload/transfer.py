"""What passes through the ring: bytes in host memory that are needed on the GPU, of whatever kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from offload.layout import KVLayout
from offload.memory.host_pool import HostPool


class Transfer(Protocol):
    """Bytes that pass through one ring slot together.

    Equal transfers bring the same bytes: a transfer that was prefetched for the next step is kept if it equals the one
    that the step wants.

    Attributes:
        host_blocks: blocks of the host pool that are among these bytes. A prefetched transfer is dropped when one of
            them is released.
    """

    @property
    def host_blocks(self) -> tuple[int, ...]: ...

    def num_bytes(self, layout: KVLayout) -> int:
        """Return the number of bytes, no more than a ring slot has."""
        ...

    def copies(
        self, slot: torch.Tensor, host: HostPool
    ) -> Iterable[tuple[torch.Tensor, Sequence[torch.Tensor] | Mapping[int, torch.Tensor]]]:
        """Return (destination, sources) of each copy. slot: the ring slot, [bytes] uint8.

        `sources[layer]`, of the destination's shape, is what the copy for this layer brings.
        """
        ...
