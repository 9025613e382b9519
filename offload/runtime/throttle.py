"""A slower link than the machine has, emulated for benchmarks.

PCIe is full duplex: each direction has the whole rate. So each of the two streams that copy gets a link of its own: the
copy stream, whose fills go to the GPU, and the write stream, whose write-through goes to the host. Copies of a stream
follow each other on its link. Each begins when the one before has ended or, if the stream was idle since, when it
comes, and takes its bytes over the rate. What waits for a copy waits for its end on this link, for that is where the
stream goes on; the host never waits.

On a GPU the time passes in a kernel behind each copy: one program, which sleeps until the GPU's clock has come so far.
It takes the place of one warp on one SM meanwhile. Without a GPU the host does the work of a stream, and sleeps.

A rate above the machine's changes nothing: no copy becomes faster.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from offload.runtime.base import Event, Stream

# A copy that comes within this time of the end of the one before counts as having waited for it. What passes in
# between is the time of launches, which a copy on a slow link would hide, as its time is longer.
SLACK_NS = 20_000


class Link(ABC):
    """One direction of an emulated link. The work of a stream calls `begin` before each copy, and `end` behind it."""

    @abstractmethod
    def begin(self) -> None:
        """Note that a copy begins."""

    @abstractmethod
    def end(self, nanoseconds: int) -> None:
        """Let the time pass in which the copy that began last would still be under way."""


class HostLink(Link):
    """A link on which the host waits, as it does all the work of a stream.

    Args:
        now: gives the time in nanoseconds.
        sleep: waits so many seconds.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, sleep: Callable[[float], None] = time.sleep):
        self.now, self.sleep = now, sleep
        self._free = self._begun = 0

    def begin(self) -> None:
        now = self.now()
        self._begun = now if now - self._free > SLACK_NS else self._free

    def end(self, nanoseconds: int) -> None:
        self._free = self._begun + nanoseconds
        if (rest := self._free - self.now()) > 0:
            self.sleep(rest / 1e9)


class DeviceLink(Link):
    """A link on which a kernel waits, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._times = torch.zeros(2, dtype=torch.int64, device=device)

    def begin(self) -> None:
        begin_kernel[(1,)](self._times, SLACK_NS, num_warps=1, enable_fp_fusion=False)

    def end(self, nanoseconds: int) -> None:
        end_kernel[(1,)](self._times, nanoseconds, num_warps=1, enable_fp_fusion=False)


@triton.jit
def begin_kernel(times, SLACK: tl.constexpr):
    """times: [2] int64, when the link is free, and when the newest copy began on it; in the GPU's nanoseconds."""
    now, free = cuda.globaltimer(), tl.load(times)
    tl.store(times + 1, tl.where(now - free > SLACK, now, free))


@triton.jit(do_not_specialize=["nanoseconds"])
def end_kernel(times, nanoseconds):
    """Sleep until the newest copy has taken so long on the link. times: as in `begin_kernel`."""
    free = tl.load(times + 1) + nanoseconds
    now = cuda.globaltimer()
    while now < free:
        # This clock goes on in steps of 32 ns to 1 us, which add up to nothing: what is kept is when the link is free.
        now = tl.inline_asm_elementwise(
            "nanosleep.u32 200; mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    tl.store(times, free)


class ThrottledStream(Stream):
    """A stream whose copies take as long as on a link of this rate."""

    def __init__(self, stream: Stream, link: Link, bytes_per_second: float) -> None:
        self._stream, self._link, self._bytes_per_second = stream, link, bytes_per_second

    def run(self, work: Callable[[], None]) -> None:
        self._stream.run(work)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        nanoseconds = round(destination.nbytes / self._bytes_per_second * 1e9)
        with self._stream.current():
            self._stream.run(self._link.begin)
            self._stream.copy(destination, source)
            self._stream.run(lambda: self._link.end(nanoseconds))

    def record(self, event: Event) -> None:
        self._stream.record(event)

    def wait(self, event: Event, rule: str) -> None:
        self._stream.wait(event, rule)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._stream.current():
            yield


def throttled(stream: Stream, bytes_per_second: float, device: torch.device) -> ThrottledStream:
    """Return the stream with a link of its own. Nothing may be in flight on it: a kernel may be compiled."""
    link = DeviceLink(device) if device.type == "cuda" else HostLink()
    stream.run(link.begin)
    stream.run(lambda: link.end(0))
    return ThrottledStream(stream, link, bytes_per_second)
