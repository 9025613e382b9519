"""The runtime of the tests, and the place where forgotten waits are found.

Without a seed every piece of work runs when it is enqueued, which is one legal order. With a seed, streams are queues
and a scheduler picks any order that the waits allow: copies run as early or as late as they may, released buffers are
filled with NaN, and two copies that touch the same bytes without an order between them are reported. So a forgotten
wait gives a wrong answer, a NaN or a `RaceError` under some seed.
"""

from __future__ import annotations

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.runtime.base import Event, Runtime, Stream, poison_of


class RaceError(RuntimeError):
    """Two copies without an order between them touch the same bytes, and at least one of them writes."""


@dataclass(frozen=True)
class _Range:
    """A half-open range of addresses."""

    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Range:
        assert tensor.is_contiguous(), "copies move contiguous ranges"
        return cls(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def overlaps(self, other: _Range) -> bool:
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class _Operation:
    number: int  # order in which the host enqueued it
    work: Callable[[], None] | None = None
    wait: tuple[SimulatedEvent, int] | None = None  # event, and the record that must have been reached
    reads: _Range | None = None  # set for copies only
    writes: _Range | None = None


class SimulatedEvent(Event):
    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self.num_recorded = 0
        self.num_reached = 0
        self.moment = 0.0  # time.perf_counter of the newest record that was reached

    def query(self, rule: str | None) -> bool:
        return (rule is not None and not self._runtime.enforces(rule)) or self.is_reached

    def synchronize(self, rule: str) -> None:
        target = self.num_recorded
        if self._runtime.enforces(rule):
            self._runtime.advance(lambda: self.num_reached >= target)

    @property
    def is_reached(self) -> bool:
        return self.num_reached >= self.num_recorded

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimulatedEvent)
        return self.moment - earlier.moment


class SimulatedStream(Stream):
    def __init__(self, name: str, runtime: SimulatedRuntime) -> None:
        self.name = name
        self.queue: deque[_Operation] = deque()
        self._runtime = runtime

    def run(self, work: Callable[[], None]) -> None:
        self._runtime.enqueue(self, work=work)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape, f"copy of {tuple(source.shape)} into {tuple(destination.shape)}"
        if not self._runtime.shuffled:
            destination.copy_(source)
            return
        self._runtime.enqueue(
            self,
            work=lambda: destination.copy_(source),
            reads=_Range.of(source),
            writes=_Range.of(destination),
        )

    def record(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        target = event.num_recorded + 1

        def reach() -> None:
            event.num_reached = max(event.num_reached, target)
            event.moment = time.perf_counter()

        self.run(reach)
        event.num_recorded = target  # last: a record that was interrupted is one that nobody waits for

    def wait(self, event: Event, rule: str) -> None:
        assert isinstance(event, SimulatedEvent)
        if self._runtime.enforces(rule) and self._runtime.shuffled:
            self._runtime.enqueue(self, wait=(event, event.num_recorded))

    def synchronize(self) -> None:
        self._runtime.advance(lambda: not self.queue)

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class SimulatedRuntime(Runtime):
    """Streams on the CPU.

    Args:
        seed: None runs everything in order at once; a number shuffles within what the waits allow.
        dropped_rule: the name of one rule whose waits are left out, to see that a test notices.
        poison: fill released buffers with NaN without a seed too.
    """

    def __init__(self, seed: int | None = None, dropped_rule: str | None = None, poison: bool = False) -> None:
        self.device = torch.device("cpu")
        self.shuffled = seed is not None
        self.poisons = poison or self.shuffled
        self.rules_seen: set[str] = set()
        self._dropped_rule = dropped_rule
        self._random = random.Random(seed)
        self.streams: list[SimulatedStream] = []
        self._events: weakref.WeakSet[SimulatedEvent] = weakref.WeakSet()
        self._favourite: SimulatedStream | None = None
        self._num_enqueued = 0
        self._executing: _Operation | None = None  # also the one that failed, until `_drop_failed`
        self._is_dropping = False
        self._has_lost_work = False
        self._is_closed = False

    def stream(self, name: str) -> SimulatedStream:
        self.streams.append(SimulatedStream(name, self))
        return self.streams[-1]

    def event(self, timed: bool = False) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self._events.add(event)
        return event

    def capture(self, stream: Stream, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    @torch.inference_mode()  # released blocks may be reclaimed outside of a step
    def poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        if self.poisons:
            stream.run(lambda: tensor.fill_(poison_of(tensor.dtype)))

    def synchronize(self) -> None:
        self.advance(lambda: not any(stream.queue for stream in self.streams))
        for event in self._events:  # a record may have been interrupted
            event.num_recorded = event.num_reached = max(event.num_recorded, event.num_reached)

    def enforces(self, rule: str) -> bool:
        """Notes the rule, and says whether its waits are kept."""
        self.rules_seen.add(rule)
        return rule != self._dropped_rule

    def enqueue(
        self,
        stream: SimulatedStream,
        work: Callable[[], None] | None = None,
        wait: tuple[SimulatedEvent, int] | None = None,
        reads: _Range | None = None,
        writes: _Range | None = None,
    ) -> None:
        if self._is_closed:
            raise RaceError(f"work on {stream.name!r}, which another runtime may have by now")
        if not self.shuffled:
            assert work is not None
            work()
            return
        self._num_enqueued += 1
        stream.queue.append(_Operation(self._num_enqueued, work, wait, reads, writes))

    def close(self) -> None:
        queued = {stream.name: len(stream.queue) for stream in self.streams if stream.queue}
        if queued:
            raise RaceError(f"streams are left to the next runtime with work in them: {queued}")
        self._is_closed = True

    @property
    def has_lost_work(self) -> bool:
        """Whether work failed since `forget_lost_work`, and with it what was enqueued behind it.

        A device loses none: what fails there fails while the host enqueues it.
        """
        return self._has_lost_work or self._executing is not None

    def forget_lost_work(self) -> None:
        self._has_lost_work = False

    def advance(self, finished: Callable[[], bool]) -> None:
        """Runs queued work in a random legal order until `finished()`; other work may stay behind."""
        self._drop_failed()
        while not finished():
            self._execute(self._pick())

    def _execute(self, stream: SimulatedStream) -> None:
        """Runs the first operation of a stream. If it fails or is interrupted, `_drop_failed` finds it."""
        operation = stream.queue[0]
        if operation.work is not None:
            self._executing = operation
            self._check_race(stream, operation)
            with torch.inference_mode():  # as it was when the work was enqueued
                operation.work()
        stream.queue.popleft()
        self._executing = None

    def _drop_failed(self) -> None:
        """What was enqueued behind an operation that failed never runs, and nobody waits for it; what came before runs.

        So it is on a GPU, where such a failure comes while the host enqueues. May itself be interrupted and called
        again.
        """
        while self._executing is not None or self._is_dropping:
            self._is_dropping = self._has_lost_work = True
            if self._executing is not None:
                number = self._executing.number
                for stream in self.streams:
                    stream.queue = deque(operation for operation in stream.queue if operation.number < number)
                self._executing = None
            while any(stream.queue for stream in self.streams):
                self._execute(self._pick())
            for event in self._events:
                event.num_reached = event.num_recorded
            self._is_dropping = False

    def _pick(self) -> SimulatedStream:
        ready = [stream for stream in self.streams if stream.queue and self._is_ready(stream.queue[0])]
        if not ready:
            heads = {stream.name: len(stream.queue) for stream in self.streams if stream.queue}
            raise RuntimeError(f"deadlock: every stream waits for an event that nothing will reach; queued: {heads}")
        # A favourite runs ahead for a while: pure chance would rarely let one stream get far ahead of another,
        # and that is where a missing wait shows.
        if self._favourite not in ready or self._random.random() < 0.1:
            self._favourite = self._random.choice(ready)
        return self._favourite

    @staticmethod
    def _is_ready(operation: _Operation) -> bool:
        return operation.wait is None or operation.wait[0].num_reached >= operation.wait[1]

    def _check_race(self, stream: SimulatedStream, operation: _Operation) -> None:
        """Compares a copy that is about to run with the copies enqueued before it that have not run."""
        if operation.writes is None:
            return
        for other_stream in self.streams:
            if other_stream is stream:
                continue
            for other in other_stream.queue:
                if other.writes is None or other.number > operation.number:
                    continue
                if (
                    operation.writes.overlaps(other.writes)
                    or operation.writes.overlaps(other.reads)
                    or operation.reads.overlaps(other.writes)
                ):
                    raise RaceError(
                        f"a copy on {stream.name!r} runs before an earlier copy on {other_stream.name!r} "
                        "that touches the same bytes, and nothing orders the two"
                    )
