"""Host memory for the KV pool of tiny engines that stops becoming usable at a given segment."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from engines import BLOCK_BYTES

import nanoinfer.execution.runner
from offload.memory.pinned import PAGE_BYTES, HostArena, Pinner

BLOCKS_PER_SEGMENT = max(PAGE_BYTES // BLOCK_BYTES, 4)


class RefusingDriver(Pinner):
    """Stands in for CUDA: pins `num_pinned` segments of host memory and refuses the next.

    Args:
        is_lazy: pin a segment only when somebody waits for it, so whoever does not wait meets a failure late. Else it
            is pinned at once, however busy the machine is.
        lacks_memory: it does not refuse: the system has no pages left for what follows.
    """

    def __init__(self, num_pinned: int, *, is_lazy: bool = False, lacks_memory: bool = False) -> None:
        self.registered: set[int] = set()
        self.num_pinned, self.is_lazy, self.lacks_memory = num_pinned, is_lazy, lacks_memory
        self.changed, self.num_wanted = threading.Condition(), 0

    def arena(self, *args, pinner, **kwargs) -> HostArena:
        return RefusedArena(self, *args, pinner=self, **kwargs)

    def want(self, num_segments: int) -> None:
        with self.changed:
            self.num_wanted = max(self.num_wanted, num_segments)
            self.changed.notify_all()

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def register(self, address: int, num_bytes: int) -> str | None:
        number = len(self.registered)
        if self.is_lazy:
            with self.changed:
                self.changed.wait_for(lambda: self.num_wanted > number)
        if number == self.num_pinned:
            return "no more"
        self.registered.add(address)
        return None


class RefusedArena(HostArena):
    num_register_threads = 1

    def __init__(self, driver: RefusingDriver, *args, **kwargs) -> None:
        self._driver = driver
        super().__init__(*args, **kwargs)

    def _begin(self, num_segments: int) -> None:
        super()._begin(num_segments)
        if not self._driver.is_lazy:  # a busy machine pins as soon as an idle one
            with self._changed:
                self._changed.wait_for(lambda: self.num_ready >= num_segments or self.has_failed)

    def wait(self, num_segments: int | None = None) -> None:
        self._driver.want(self.num_segments if num_segments is None else num_segments)
        super().wait(num_segments)

    def close(self) -> None:
        self._driver.want(self.num_segments)
        super().close()

    def _touch(self, touchers, index: int, num_threads: int) -> list[Future[None]]:
        if not self._driver.lacks_memory or index < self._driver.num_pinned:
            return super()._touch(touchers, index, num_threads)
        failed: Future[None] = Future()
        failed.set_exception(MemoryError("the system has no host memory left"))
        return [failed]


def refuse_pinning(monkeypatch, num_pinned: int, **how: bool) -> RefusingDriver:
    """Give engines a host pool of which `num_pinned` segments, of `BLOCKS_PER_SEGMENT` blocks each, become usable."""
    driver = RefusingDriver(num_pinned, **how)
    monkeypatch.setattr(nanoinfer.execution.runner, "HostArena", driver.arena)
    for name in ("SEGMENT_BYTES", "DEMAND_BYTES"):
        monkeypatch.setattr(nanoinfer.execution.runner, name, BLOCKS_PER_SEGMENT * BLOCK_BYTES)
    return driver
