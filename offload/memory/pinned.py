"""Pinned host memory of an exact size, usable from its first segment on.

torch's pinned allocator rounds sizes up to a power of two and faults pages in on one core. This arena maps exactly the
bytes asked for, lets all cores touch the pages (in huge pages where the kernel gives them; on demand two cores), and
registers them with the driver piece by piece in the background, through a `Pinner`. The order of these steps is what
makes it fast: registering untouched memory faults every page in under a driver lock.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from offload.memory.host_memory import memory_available_bytes

GIB = 2**30
PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
# One registration of 512 GiB or more fails on every driver seen; pieces also let the first ones be used early.
MAX_REGISTER_BYTES = 16 * GIB
# What others' copies and kernels wait for is one registration: of so much, or of one row that takes more.
PIECE_BYTES = 16 * 2**20


class _Stopped(Exception):
    """The arena was closed while a thread rested."""


class PinError(RuntimeError):
    """The system refused to pin host memory."""


class Pinner(ABC):
    """Registers host memory with a driver, for copies that run beside everything else. Threads share it."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin these bytes, and map them so that kernels may read them; return what went wrong, or None."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Unpin what was registered at this address."""

    def enter(self) -> None:
        """Called in each thread before it registers."""

    def near(self) -> set[int] | None:
        """Return the processors whose memory is nearest to the device; None: all are as near, or nobody knows."""
        return None

    def copy_gbps(self, pinned: bool) -> float | None:
        """Return the GB/s (10^9) of copies to the device from pinned or pageable memory; None: nobody can tell."""
        return None


class HostArena:
    """Host memory in equal segments that become usable one after the other.

    Args:
        num_segments, segment_bytes: the segments; each is rounded up to whole pages, and no further.
        last_segment_bytes: size of the last segment, if it is smaller.
        pinner: pins the memory. None maps it only: its pages come when they are first written.
        require_pin: raise where the system refuses to pin, instead of going on with pageable memory.
        progress: called from the background with (segments ready, segments in all).
        available_bytes: host memory that may be taken; None asks the system.
        remedy: what a message advises so that less memory is wanted.
        on_demand: take memory segment by segment, as `want` asks for it, and not all at once. Others use the device
            then, and wait for the driver: some `PIECE_BYTES` are pinned at a time, and behind them is as long a rest,
            unless somebody waits.
        num_rows: equal parts of a segment, each of which is pinned at once: the driver refuses a copy that lies in two
            pieces.

    Raises:
        MemoryError: more than is available, or than the system maps; nothing was mapped.
    """

    num_register_threads = 2  # the driver serialises part of the work

    def __init__(
        self,
        num_segments: int,
        segment_bytes: int,
        *,
        pinner: Pinner | None,
        last_segment_bytes: int | None = None,
        require_pin: bool = False,
        progress: Callable[[int, int], None] | None = None,
        available_bytes: int | None = None,
        remedy: str = "lower host_memory_limit",
        on_demand: bool = False,
        num_rows: int = 1,
    ) -> None:
        assert num_segments >= 1 and segment_bytes >= 1, f"{num_segments} segments of {segment_bytes} bytes"
        self.num_segments, self.segment_bytes = num_segments, segment_bytes
        self._last_bytes = segment_bytes if last_segment_bytes is None else last_segment_bytes
        assert 1 <= self._last_bytes <= segment_bytes, "the last segment may be smaller, not larger"
        assert segment_bytes % num_rows == self._last_bytes % num_rows == 0, f"{num_rows} equal parts of a segment"
        self._stride = _whole_pages(segment_bytes)
        self._remedy = remedy
        self._available_bytes = available_bytes
        if not on_demand:
            self._check_available(self.mapped_bytes, self._available())
        try:
            self._map = mmap.mmap(-1, self.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"{self.mapped_bytes / GIB:.2f} GiB of host memory wanted, {memory_available_bytes() / GIB:.2f} GiB "
                f"are available, but the system does not map as much ({error}): {remedy}, or raise the "
                "limit of address space (ulimit -v; vm.overcommit_memory=2 sets one for the whole machine)"
            ) from error
        with suppress(OSError, AttributeError):  # smaller pages are slower to register, and otherwise the same
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._buffer.data_ptr()
        self._registered: list[int] = []  # addresses
        self._is_pinned = [False] * num_segments
        self._is_done = [False] * num_segments
        self._num_wanted = self._num_begun = 0  # segments that were asked for; those on their way or ready
        self._was_told = self._is_pinning = False
        self._failure: BaseException | None = None
        self._refusal: str | None = None
        self._require_pin = require_pin
        self._progress = progress
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._pinner, self._on_demand, self._num_rows = pinner, on_demand, num_rows
        self._in_turn, self._rests_until, self._num_waiting = threading.Lock(), 0.0, 0
        self._release = weakref.finalize(self, _unregister_all, self._registered, pinner, self._map)
        self._thread: threading.Thread | None = None
        if not on_demand:
            self._begin(num_segments)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space, exactly the page-rounded segments."""
        return sum(self._span(index) for index in range(self.num_segments))

    @property
    def num_ready(self) -> int:
        """Segments 0 to num_ready - 1 can be used."""
        return next((i for i, is_done in enumerate(self._is_done) if not is_done), self.num_segments)

    @property
    def pinned_bytes(self) -> int:
        return sum(self._span(index) for index, is_pinned in enumerate(self._is_pinned) if is_pinned)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes that are ready and pageable."""
        return sum(self._span(index) for index in range(self.num_ready) if not self._is_pinned[index])

    @property
    def has_failed(self) -> bool:
        """Whether no more segments become ready than are."""
        return self._failure is not None

    def segment(self, index: int) -> torch.Tensor:
        """Return a segment: [segment_bytes] uint8, CPU; the last one may be shorter.

        Raises:
            RuntimeError: it is not ready yet; `wait` first.
        """
        if not self._is_done[index]:
            raise RuntimeError(f"segment {index} of {self.num_segments} is not ready: call wait({index + 1}) first")
        num_bytes = self._last_bytes if index == self.num_segments - 1 else self.segment_bytes
        return self._buffer[index * self._stride : index * self._stride + num_bytes]

    def want(self, num_segments: int) -> None:
        """Have so many segments become ready in the background.

        Raises:
            MemoryError: less is available than they take; those that there is memory for are on their way.
        """
        if num_segments <= self._num_wanted:
            return
        available = self._available()
        coming = sum(self._span(i) for i in range(self._num_wanted) if not self._is_done[i])  # or a part of it
        for count in range(self._num_wanted + 1, num_segments + 1):
            self._check_available(coming + self._span(count - 1), available)
            self._begin(count)
            coming += 0 if self._is_done[count - 1] else self._span(count - 1)

    def _available(self) -> int:
        return memory_available_bytes() if self._available_bytes is None else self._available_bytes

    def _check_available(self, num_bytes: int, available: int) -> None:
        if num_bytes > available:
            raise MemoryError(
                f"{num_bytes / GIB:.2f} GiB of host memory wanted, {available / GIB:.2f} GiB are available: "
                f"{self._remedy} or free some memory"
            )

    def _begin(self, num_segments: int) -> None:
        with self._changed:
            self._num_wanted = num_segments
            if self._pinner is None:
                self._is_done[:num_segments] = [True] * num_segments
            if self._pinner is not None and not self._is_pinning:
                self._is_pinning = True
                self._thread = threading.Thread(target=self._pin_all, name="pin-host-memory", daemon=True)
                self._thread.start()

    def wait(self, num_segments: int | None = None) -> None:
        """Block until that many segments (None: all), which were asked for, are ready.

        Raises:
            PinError: with `require_pin`, the system refused.
            Exception: whatever else went wrong in the background.
        """
        wanted = self.num_segments if num_segments is None else num_segments
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self.num_ready >= wanted or self._failure is not None)
            finally:
                self._num_waiting -= 1
            if self.num_ready < wanted:
                assert self._failure is not None
                raise self._failure

    def close(self) -> None:
        """Stop pinning, unpin everything and unmap it once no tensor refers to it. May be called again."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()  # who rests
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            if self._failure is None:
                self._failure = RuntimeError("the host arena is closed")
            self._is_done = [False] * self.num_segments
            self._changed.notify_all()
        self._release()

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Background

    def _pin_all(self) -> None:
        try:
            num_threads = min(os.cpu_count() or 1, 2 if self._on_demand else 8)  # more only queue up in the kernel
            with (
                ThreadPoolExecutor(num_threads, "touch", _run_on, (self._pinner.near(),)) as touchers,
                ThreadPoolExecutor(self.num_register_threads, "register") as registrars,
            ):
                while wanted := self._take_wanted():
                    touched = {index: self._touch(touchers, index, num_threads) for index in wanted}
                    for future in [registrars.submit(self._pin, index, touched[index]) for index in wanted]:
                        future.result()
                    if self.unpinned_bytes and not self._was_told and not self._stop.is_set():
                        self._was_told = True
                        self._warn()
        except BaseException as error:  # handed to whoever waits
            self._stop.set()
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take_wanted(self) -> range:
        """Return the segments that were asked for since the last call. If there are none, this thread ends."""
        with self._changed:
            wanted = range(self._num_begun, 0 if self._stop.is_set() else self._num_wanted)
            self._num_begun = max(self._num_begun, wanted.stop)
            self._is_pinning = bool(wanted)
            return wanted

    def _span(self, index: int) -> int:
        """Mapped bytes of a segment."""
        return self._stride if index < self.num_segments - 1 else _whole_pages(self._last_bytes)

    def _touch(self, touchers: ThreadPoolExecutor, index: int, num_threads: int) -> list[Future[None]]:
        """Let all cores fault in the pages of one segment; on demand, two of them."""
        span = self._span(index)
        share = -(-span // num_threads // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES or _HUGE_PAGE_BYTES
        base = self._address + index * self._stride
        return [touchers.submit(self._touch_range, base + at, min(share, span - at)) for at in range(0, span, share)]

    def _touch_range(self, address: int, num_bytes: int) -> None:
        step = _HUGE_PAGE_BYTES if self._on_demand else num_bytes  # others may map memory in between
        for at in range(0, num_bytes, step):
            if not self._stop.is_set():
                populate(address + at, min(step, num_bytes - at))

    def _pin(self, index: int, touched: list[Future[None]]) -> None:
        for future in touched:
            future.result()
        if self._stop.is_set():
            return
        if self._refusal is None:
            try:
                self._register_segment(index)
            except _Stopped:
                return
        with self._changed:
            self._is_done[index] = True
            self._changed.notify_all()
        if self._progress is not None:
            self._progress(self.num_ready, self.num_segments)

    def _register_segment(self, index: int) -> None:
        self._pinner.enter()
        begin = self._address + index * self._stride
        end, piece = begin + self._span(index), self._piece_bytes(index)
        for address in range(begin, end, piece):
            refusal = self._register(address, min(piece, end - address))
            if refusal is not None:
                self._refusal = refusal
                if self._require_pin:
                    raise PinError(
                        f"the system refused to pin host memory after {self.pinned_bytes / GIB:.2f} of "
                        f"{self.mapped_bytes / GIB:.2f} GiB ({refusal}): {self._remedy}, raise the limit of "
                        'locked memory (ulimit -l; WSL2 allows little), or set pin_host_memory="auto" to go on slower'
                    )
                return
            self._registered.append(address)  # at once: whatever follows, close() unpins it
        self._is_pinned[index] = True

    def _piece_bytes(self, index: int) -> int:
        """Bytes of a segment that are registered at once."""
        if not self._on_demand:
            return MAX_REGISTER_BYTES
        num_bytes = self._last_bytes if index == self.num_segments - 1 else self.segment_bytes
        rows = math.lcm(num_bytes // self._num_rows, PAGE_BYTES)  # the fewest that end where a page ends
        return max(rows, PIECE_BYTES // rows * rows)

    def _register(self, address: int, num_bytes: int) -> str | None:
        if not self._on_demand:
            return self._pinner.register(address, num_bytes)
        with self._in_turn:
            with self._changed:
                rest = max(0.0, self._rests_until - time.perf_counter())
                self._changed.wait_for(lambda: self._stop.is_set() or self._num_waiting, rest)
            if self._stop.is_set():
                raise _Stopped
            if self._refusal is not None:  # of another thread's piece
                return self._refusal
            begin = time.perf_counter()
            self._refusal = self._pinner.register(address, num_bytes)
            end = time.perf_counter()
            self._rests_until = 2 * end - begin
            return self._refusal

    def _warn(self) -> None:
        speed, pinned = "", f" to {self.pinned_bytes / GIB:.2f} GiB" if self.pinned_bytes else ""
        usual, pageable = (self._pinner.copy_gbps(pinned) for pinned in (True, False))
        if usual is not None:
            speed = f", which stream at {pageable:.1f} GB/s instead of {usual:.1f}"
        warnings.warn(
            f"the system refused to pin {self.unpinned_bytes / GIB:.2f} of {self.mapped_bytes / GIB:.2f} GiB of host "
            f"memory{speed}: {self._remedy}{pinned}, or raise the limit of locked memory (ulimit -l; WSL2 allows "
            f"little). Its reason: {self._refusal}",
            stacklevel=2,
        )


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _run_on(processors: set[int] | None) -> None:
    """Have this thread run on these processors alone."""
    if processors is not None:
        with suppress(OSError):  # they were taken from this process meanwhile
            os.sched_setaffinity(0, processors)


def populate(address: int, num_bytes: int) -> None:
    """Fault pages in for writing. ctypes releases the interpreter lock, so threads do it side by side."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() == errno.ENOMEM:
        raise MemoryError(f"the system has no {num_bytes / 2**20:.0f} MiB of host memory left: lower host_memory_limit")
    ctypes.memset(address, 0, num_bytes)  # a kernel without MADV_POPULATE_WRITE


def _unregister_all(registered: list[int], pinner: Pinner | None, memory: mmap.mmap) -> None:
    """Unpin before the memory can be unmapped; `memory` is passed only to keep it alive until here."""
    while registered:
        pinner.unregister(registered.pop())
