"""The runtime of a machine without a GPU: work runs in order, when it is enqueued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.runtime.base import Event, Runtime, Stream, poison_of


class CpuEvent(Event):
    """A point that has always been reached: nothing is in flight behind it."""

    def __init__(self) -> None:
        self.moment = 0.0  # time.perf_counter of the newest record

    def query(self, rule: str | None) -> bool:
        return True

    def synchronize(self, rule: str) -> None:
        pass

    def seconds_since(self, earlier: CpuEvent) -> float:
        return self.moment - earlier.moment


class CpuStream(Stream):
    """A queue that is always empty."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape, f"copy of {tuple(source.shape)} into {tuple(destination.shape)}"
        destination.copy_(source)

    def record(self, event: CpuEvent) -> None:
        event.moment = time.perf_counter()

    def wait(self, event: Event, rule: str) -> None:
        pass

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class CpuRuntime(Runtime):
    """Streams on the CPU.

    Args:
        poison: fill released buffers with NaN, so that whoever still reads them is noticed.
    """

    def __init__(self, poison: bool = False) -> None:
        self.device = torch.device("cpu")
        self.poisons = poison

    def stream(self, name: str) -> CpuStream:
        return CpuStream()

    def event(self, timed: bool = False) -> CpuEvent:
        return CpuEvent()

    def capture(self, stream: Stream, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    @torch.inference_mode()  # released blocks may be reclaimed outside of a step
    def poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        if self.poisons:
            tensor.fill_(poison_of(tensor.dtype))

    def synchronize(self) -> None:
        pass
