"""When a released block may be handed out again: once the copies that read or write it are acknowledged.

Everything here is numbers: an *operation* is whatever enqueues copies (a step, or a group of blocks that is stored),
and operations are counted. Another process may run the operations: it acknowledges each by its number.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from offload.blocks import GPU, HOST, STATES, BlockPool

GPU_RULE = "gpu_block.reuse_after_write_through"
HOST_RULE = "host_block.reuse_after_copies"
STORE_RULE = "moved_blocks.reuse_after_store"
LOAD_RULE = "moved_blocks.read_after_load"
WRITES, FILLS = "writes", "fills"


class Acknowledgements(Protocol):
    """What is known of the operations' copies: `WRITES` go to the host, `FILLS` come from it.

    Copies of one kind run in the order of their operations.
    """

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        """Whether all copies of this kind up to this operation have run."""

    def wait(self, kind: str, operation: int, rule: str) -> None:
        """Wait until `has_run` is true."""


@dataclass
class _Deferred:
    """Released blocks; they return to their pool once all writes and fills up to these operations have run."""

    blocks: list[int]
    writes: int
    fills: int = 0


class BlockLifetimes:
    """Gives blocks of both pools back when nothing can touch them any more.

    Args:
        gpu_blocks, host_blocks: who holds which block.
        acknowledgements: tell which copies have run; not asked before the first copy.
        let_go: told of blocks that became free, whose content nobody can reach (the pool's name, the blocks).
        slots: who holds which slot for states; None: there are none.

    Attributes:
        operation: number of the newest operation.
        deferred_gpu, deferred_host: released blocks, in the order in which their copies are acknowledged.
        gone: host blocks that nobody has held since `take_gone`.
    """

    def __init__(
        self,
        gpu_blocks: BlockPool,
        host_blocks: BlockPool,
        acknowledgements: Acknowledgements,
        let_go: Callable[[str, list[int]], None] = lambda pool, blocks: None,
        slots: BlockPool | None = None,
    ) -> None:
        self.gpu_blocks, self.host_blocks = gpu_blocks, host_blocks
        self.slots = BlockPool(0) if slots is None else slots
        self.acknowledgements, self._let_go = acknowledgements, let_go
        self.operation = 0
        self._writing: deque[tuple[int, list[int]]] = deque()  # operations whose writes may not have run, their blocks
        self._last_write: dict[int, int] = {}  # the newest of these by GPU block
        self._newest_write = 0
        self.deferred_gpu: list[_Deferred] = []
        self.deferred_host: list[_Deferred] = []
        self.gone: set[int] = set()

    def begin(self, written: Collection[int] = ()) -> int:
        """Count an operation that copies the GPU blocks `written` to the host. It must be run before any other."""
        self.operation += 1
        if written:
            self._newest_write = self.operation
            self._writing.append((self.operation, list(written)))
            self._last_write.update(dict.fromkeys(written, self.operation))
        return self.operation

    def take_gone(self) -> tuple[int, ...]:
        """Return the host blocks that nobody has held since the last call: what was prefetched of them is worthless."""
        gone, self.gone = self.gone, set()
        return tuple(sorted(gone))

    def release_gpu(self, blocks: Iterable[int]) -> None:
        """Give back GPU blocks, each once the write-through that reads it has run."""
        self._forget_finished_writes()
        waiting: dict[int, _Deferred] = {}
        finished = []
        for block in blocks:
            if self.gpu_blocks.references(block) > 1:
                self.gpu_blocks.release([block])  # somebody else still holds it: the last release waits
                continue
            write = self._last_write.get(block)
            if write is None:
                finished.append(block)
            else:
                waiting.setdefault(write, _Deferred([], write)).blocks.append(block)
        self._free(self.gpu_blocks, finished)
        for deferred in waiting.values():
            insort(self.deferred_gpu, deferred, key=lambda other: other.writes)

    def release_host(self, blocks: Iterable[int]) -> None:
        """Give back host blocks, once the copies that read or write them have run."""
        released = list(blocks)
        if released:
            self.deferred_host.append(_Deferred(released, self._newest_write, self.operation))
            self.gone.update(self.host_blocks.give_back_later(released))

    def release_slots(self, slots: Iterable[int]) -> None:
        """Give back slots of states. Copies hold theirs, so none touches them any more; steps come one by one."""
        if freed := self.slots.release(slots):
            self._let_go(STATES, freed)

    def take_back_gpu(self, block: int) -> bool:
        """Hold a released GPU block again that a write-through still reads. Return False if the block is no such block.

        The block may be read at once. When it is released again, it waits for that write-through as before.
        """
        for deferred in self.deferred_gpu:
            if block in deferred.blocks:
                deferred.blocks.remove(block)
                return True
        return False

    def reclaim(self) -> None:
        """Put released blocks whose copies have run back into their pools."""
        self._forget_finished_writes()
        self._reclaim(self.deferred_gpu, self.gpu_blocks, GPU_RULE)
        self._reclaim(self.deferred_host, self.host_blocks, HOST_RULE)

    def wait_for_gpu(self, count: int) -> None:
        """Wait, for as few copies as possible, until `count` GPU blocks are free or all released ones are."""
        self._reclaim(self.deferred_gpu, self.gpu_blocks, GPU_RULE, wanted=count)

    def wait_for_host(self, count: int) -> None:
        """Wait, for as few copies as possible, until `count` host blocks are free or all released ones are."""
        self._reclaim(self.deferred_host, self.host_blocks, HOST_RULE, wanted=count)

    @property
    def num_deferred_gpu(self) -> int:
        """Number of released GPU blocks that a copy may still read."""
        return sum(len(deferred.blocks) for deferred in self.deferred_gpu)

    @property
    def num_deferred_host(self) -> int:
        """Number of host blocks that nobody holds any more, but that a copy may still touch."""
        return self.host_blocks.num_returning

    def recover(self) -> None:
        """Forget every operation and every released block. Nothing may be in flight; the owner rebuilds both pools."""
        self._writing.clear()
        self._last_write.clear()
        self.deferred_gpu.clear()
        self.deferred_host.clear()
        self.gone.clear()

    def _forget_finished_writes(self) -> None:
        while self._writing and self.acknowledgements.has_run(WRITES, self._writing[0][0], GPU_RULE):
            operation, blocks = self._writing.popleft()
            for block in blocks:
                if self._last_write.get(block) == operation:
                    del self._last_write[block]

    def _reclaim(self, waiting: list[_Deferred], pool: BlockPool, rule: str, wanted: int = 0) -> None:
        """Free what is acknowledged; wait for more until `wanted` blocks are free."""
        while waiting:
            parts = (WRITES, waiting[0].writes), (FILLS, waiting[0].fills)
            if not all(self.acknowledgements.has_run(*part, rule) for part in parts):
                if pool.num_free >= wanted:
                    return
                for part in parts:
                    self.acknowledgements.wait(*part, rule)
            self._free(pool, waiting.pop(0).blocks)

    def _free(self, pool: BlockPool, blocks: list[int]) -> None:
        is_host = pool is self.host_blocks  # whose blocks are always released later
        if freed := pool.give_back(blocks) if is_host else pool.release(blocks):
            self._let_go(HOST if is_host else GPU, freed)
