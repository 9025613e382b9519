"""How many blocks of the host pool there are to hand out: those whose memory can be used, and no more."""

from __future__ import annotations

import warnings

from nanoinfer.common.units import format_size
from offload import BlockLifetimes, HostPool


class HostRoom:
    """Adds the blocks of the host pool to those that can be handed out, as their memory becomes usable.

    Memory is pinned in the background, segment by segment, and may come to an end at any of them. So a block counts
    once its memory is there: whatever was promised or handed out can be used, and no step finds out that it cannot.

    Args:
        lifetimes: has the pool of host blocks, which grows.
        host: the memory. Of it only `wait_for` is called.
        num_planned: blocks that the host pool is to have.
        block_bytes: bytes of a block, of all layers.

    Attributes:
        failure: why no more blocks will ever be usable; None: more may, or all are.
    """

    def __init__(self, lifetimes: BlockLifetimes, host: HostPool, num_planned: int, block_bytes: int) -> None:
        self.failure: Exception | None = None
        self._lifetimes, self._host = lifetimes, host
        self._num_planned, self._block_bytes = num_planned, block_bytes
        self._was_told = False

    @property
    def num_possible(self) -> int:
        """Blocks that there are, or may be one day."""
        return self._num_planned if self.failure is None else self._lifetimes.host_blocks.num_blocks

    def wait_for(self, num_unused: int, may_wait: bool = True) -> None:
        """Wait until so many blocks hold nothing, not even something that is cached, or no more become usable.

        Args:
            may_wait: False: only count those that have become usable. Whoever has something to run asks so, and again.
        """
        blocks = self._lifetimes.host_blocks
        if blocks.num_blocks == self.num_possible:
            return
        num_short = num_unused - (blocks.num_free - blocks.num_cached)
        num_usable, failure = self._host.wait_for(
            min(blocks.num_blocks + max(0, num_short), self._num_planned), may_wait
        )
        blocks.grow(num_usable - blocks.num_blocks)
        self.failure = failure  # only now: until then, there may be more than are counted

    def is_coming(self, num_blocks: int) -> bool:
        """Whether the pool has fewer blocks so far, and may have as many one day. Waits for nothing."""
        blocks = self._lifetimes.host_blocks
        self.wait_for(num_blocks, may_wait=False)
        return blocks.num_blocks < min(num_blocks, self.num_possible)

    def require(self, num_blocks: int) -> None:
        """Wait until the pool has so many blocks.

        Raises:
            PinError, MemoryError: it never will.
        """
        blocks = self._lifetimes.host_blocks
        self.wait_for(blocks.num_free - blocks.num_cached + num_blocks - blocks.num_blocks)
        if blocks.num_blocks < num_blocks and self.failure is not None:
            raise self.failure.with_traceback(None)  # or it would hold the frames of all who were told

    def tell(self) -> None:
        """Warn, once, if offload mode has to do with less than was planned."""
        if self.failure is None or self._was_told:
            return
        self._was_told = True
        num_usable = self._lifetimes.host_blocks.num_blocks
        usable, planned = (format_size(count * self._block_bytes) for count in (num_usable, self._num_planned))
        warnings.warn(
            f"the KV pool on the host has {usable} instead of {planned}, so fewer requests run at a time: "
            f"{self.failure}",
            stacklevel=2,
        )
