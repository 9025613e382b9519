"""The small interface through which everything reaches streams, events, graphs and copies.

Two implementations: `CudaRuntime` (offload/runtime/cuda.py) and `CpuRuntime` (offload/runtime/cpu.py). The tests have a
third, which runs work in any order that the waits allow (tests/support/simulated.py). Work is *enqueued* on a stream
as a function; it may run at any later time that the waits allow, so a function must not depend on host state that
changes after it was enqueued, and the host must not read what it writes before synchronising.

Every wait carries the name of the rule that it enforces, such as "ring.fill_after_attention". The simulated runtime
can drop one rule by name, which is how the tests prove that each wait is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from offload.runtime.link import HostLink, Link


def poison_of(dtype: torch.dtype) -> float | int:
    """Return NaN, or for bytes a value that is NaN in every type of floating point that they may hold."""
    return 255 if dtype == torch.uint8 else torch.nan


class Event(ABC):
    """A point in a stream. Recording again moves it; a wait refers to the newest record at the time of the call."""

    @abstractmethod
    def query(self, rule: str | None) -> bool:
        """Whether all work before the newest record has run; True if nothing was recorded.

        rule: as in `wait`; None for timed events, on which no order depends.
        """

    @abstractmethod
    def synchronize(self, rule: str) -> None:
        """Block the host until the newest record has been reached; `rule` names what this protects."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two timed events that have been reached."""


class Stream(ABC):
    """An in-order queue of device work."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Enqueue the device work that `work` launches."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between tensors of the same shape, asynchronous when the host side is pinned."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Move the event to this point of the stream."""

    @abstractmethod
    def wait(self, event: Event, rule: str) -> None:
        """Let later work of this stream run only after the newest record of `event`; no wait if there is none."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Make this stream the current one for a block of calls, which saves the switch in every single call."""


class Runtime(ABC):
    """Makes streams, events, graphs and pinned buffers on one device."""

    device: torch.device
    poisons: bool  # whether `poison` does anything

    @abstractmethod
    def stream(self, name: str) -> Stream: ...

    @abstractmethod
    def event(self, timed: bool = False) -> Event:
        """Return a new event; `timed` ones can be subtracted, and cost a little more."""

    @abstractmethod
    def capture(self, stream: Stream, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` into a graph, bound to the addresses it was captured with; return what `Stream.run` replays.

        On CUDA it runs `work` once first, so that nothing is compiled in capture.
        """

    @abstractmethod
    def staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a small host buffer (pinned on CUDA) for uploads and read-backs."""

    @abstractmethod
    def poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Mark `tensor` as released: a runtime that poisons fills it at this point of the stream, see `poison_of`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every stream of this runtime is idle. Never called inside a step."""

    def link(self) -> Link:
        """Return a link of a rate of its own for one of the streams, see `throttle.py`: here the host waits on it."""
        return HostLink()

    def close(self) -> None:
        """Give the streams to the next runtime. Nothing may be enqueued on them afterwards."""
