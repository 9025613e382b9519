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

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.runtime.base import Event, Stream
from offload.runtime.link import Link


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


def throttled(stream: Stream, bytes_per_second: float, link: Link) -> ThrottledStream:
    """Return the stream with this link for its own. Nothing may be in flight on it: a kernel may be compiled."""
    stream.run(link.begin)
    stream.run(lambda: link.end(0))
    return ThrottledStream(stream, link, bytes_per_second)
