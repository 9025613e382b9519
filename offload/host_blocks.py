"""The numbers of host blocks: as many as there is memory for, and some that are borrowed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from offload.blocks import BlockPool


class HostMemory(Protocol):
    """The memory of host blocks, see `HostPool`."""

    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]: ...


class HostBlocks(BlockPool):
    """A pool that grows as memory becomes usable.

    Memory is pinned in the background, segment by segment as it is asked for, and may come to an end at any of them. So
    a block counts once its memory is there: whatever was promised or handed out can be used, and no step finds out that
    it cannot.

    A borrowed block has a number beyond these. It is gone when nobody holds it.

    Args:
        memory: of the blocks.
        num_planned: blocks that the pool is to have.
        stretch: as for `FreeBlocks`.

    Attributes:
        failure: why no more blocks will ever be usable; None: more may, or all are.
        borrowed: the blocks that are borrowed.
    """

    def __init__(self, memory: HostMemory, num_planned: int, stretch: int | None = None) -> None:
        super().__init__(0, stretch=stretch)
        self.failure: Exception | None = None
        self.borrowed: set[int] = set()
        self._memory, self.num_planned = memory, num_planned

    @property
    def num_possible(self) -> int:
        """Blocks that there are, or may be one day."""
        return self.num_planned if self.failure is None else self.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, borrowed ones not counted."""
        return super().num_used - len(self.borrowed)

    @property
    def num_returning(self) -> int:
        return super().num_returning - sum(map(self.is_leaving, self.borrowed))

    def wait_for(self, num_unused: int, may_wait: bool = True) -> None:
        """Wait until so many blocks hold nothing, not even something that is cached, or no more become usable.

        Args:
            may_wait: False: only count those that have become usable. Whoever has something to run asks so, and again.
        """
        if self.num_blocks == self.num_possible:
            return
        num_short = num_unused - (self.num_free - self.num_cached)
        num_wanted = min(max(0, self.num_blocks + num_short), self.num_planned)
        num_usable, failure = self._memory.wait_for(num_wanted, may_wait)
        self.grow(num_usable - self.num_blocks)
        self.failure = failure  # only now: until then, there may be more than are counted

    def is_coming(self, num_blocks: int) -> bool:
        """Whether the pool has fewer blocks so far, and may have as many one day. Waits for nothing."""
        self.wait_for(self.num_free - self.num_cached + num_blocks - self.num_blocks, may_wait=False)
        return self.num_blocks < min(num_blocks, self.num_possible)

    def require(self, num_blocks: int) -> None:
        """Wait until the pool has so many blocks.

        Raises:
            PinError, MemoryError: it never will.
        """
        self.wait_for(self.num_free - self.num_cached + num_blocks - self.num_blocks)
        if self.num_blocks < num_blocks and self.failure is not None:
            raise self.failure.with_traceback(None)  # or it would hold the frames of all who were told

    def take_borrowed(self, blocks: Iterable[int]) -> list[int]:
        """Hand out blocks for which memory was borrowed."""
        blocks = list(blocks)
        self.borrowed.update(blocks)
        self.holders.update(dict.fromkeys(blocks, 1))
        self._num_references += len(blocks)
        return blocks

    def rebuild(self, held: Iterable[int], keeps_key: Callable[[Hashable], bool] = lambda key: False) -> None:
        held = list(held)
        super().rebuild(held, keeps_key)
        self.borrowed &= set(held)
        for block in [block for block in self._cached if block >= self._num_blocks]:
            del self._cached[block]
            self._forget(block)

    def _vacate(self, block: int) -> bool:
        if block not in self.borrowed:
            return super()._vacate(block)
        self.borrowed.remove(block)
        if block in self.key_of:
            self._forget(block)
        return True
