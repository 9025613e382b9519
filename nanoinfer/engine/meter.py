"""What bounds a run: the times of all steps, and of the streams in a sample of the steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from nanoinfer.engine.trace import Trace
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.batch import Batch
from nanoinfer.step.executor import Executor, SampledToken
from offload import Timeline
from offload.runtime.timeline import COMPUTE, COPY

SAMPLE_EVERY = 16  # decode steps; a mark costs the host a few microseconds, and there are several per ring slot
LINK_BOUND = 0.85  # share of the time in which the link is busy
WAIT_BOUND = 0.5  # share of the time that experts are brought in, while nothing else can run
CPU_BOUND = 0.9  # share of the time in which the host does not wait for the device


@dataclass
class LaunchedStep:
    """A step that was launched and not read yet.

    Attributes:
        number: by which the executor knows it.
        streamed_bytes: what the copy engine brings for it; experts that come one by one are not known yet.
        launched: `time.perf_counter` at the begin of the launch.
        is_sampled: whether the sampling is launched.
        made: when the step was seen to have run, if it was before the host waited for it.
        is_apart: whether drafts had the step before be read first, so that the device waited for the host.
    """

    batch: Batch[Sequence]
    number: int
    launched: float
    streamed_bytes: int
    timeline: Timeline | None
    is_sampled: bool = False
    made: float | None = None
    is_apart: bool = False


@dataclass
class DecodeTimes:
    """Sums over decode steps, in seconds.

    Attributes:
        seconds: time from the read of one step to the read of the next.
        host_seconds: the part of `seconds` in which the host did not wait for the device.
        streamed_bytes: what passed over the link to the GPU; num_streaming_steps, streaming_seconds: the steps in which
            anything did, and the part of `seconds` that belongs to them.
        sampled_seconds: the part of `seconds` that belongs to steps whose streams were timed.
        copy_seconds: the part of `sampled_seconds` in which the copy engine brought KV and weights to the GPU.
        wait_seconds: the part of `sampled_seconds` in which compute waited for these copies.
        compute_seconds: the part of `sampled_seconds` in which compute had work.
        experts_read: experts that some row chose, of each layer.
        fetched_bytes: the part of `streamed_bytes` that are experts which kernels brought one by one.
        fetch_seconds: the part of `seconds` that this took at the link's bandwidth, while nothing else could run.
    """

    num_steps: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    num_streaming_steps: int = 0
    streaming_seconds: float = 0.0
    streamed_bytes: int = 0
    sampled_seconds: float = 0.0
    copy_seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    experts_read: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0

    def since(self, earlier: DecodeTimes) -> DecodeTimes:
        """Return the difference from `earlier`, a copy of these sums made at an earlier time."""
        names = [entry.name for entry in fields(self)]
        return DecodeTimes(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def link_busy_fraction(self) -> float:
        """Share of the time in which the link brought KV, weights and experts."""
        return min(1.0, self._share(self.copy_seconds) + self.fetch_fraction)

    @property
    def wait_fraction(self) -> float:
        """Share of the time in which compute waited for the link."""
        return min(1.0, self.copy_wait_fraction + self.fetch_fraction)

    @property
    def copy_wait_fraction(self) -> float:
        """Share of the time in which compute waited for the copy engine."""
        return self._share(self.wait_seconds)

    @property
    def fetch_fraction(self) -> float:
        """Share of the time in which experts were brought one by one, and waited for."""
        return min(1.0, self.fetch_seconds / self.seconds) if self.seconds else 0.0

    @property
    def compute_busy_fraction(self) -> float:
        """Share of the time in which compute had work; bringing experts is none."""
        return max(0.0, self._share(self.compute_seconds) - self.fetch_fraction)

    def _share(self, seconds: float) -> float:
        return min(1.0, seconds / self.sampled_seconds) if self.sampled_seconds else 0.0

    @property
    def bound(self) -> str:
        """What the steps were bound by: "link", "device memory", "CPU" or, where too few ran to tell, "unknown"."""
        if not self.seconds or (self.streamed_bytes > self.fetched_bytes and not self.sampled_seconds):
            return "unknown"
        # The link is checked first: a host that is far ahead waits for room in the launch queue, which looks like work.
        if self.link_busy_fraction >= LINK_BOUND or self.fetch_fraction >= WAIT_BOUND:
            return "link"
        return "CPU" if self.host_seconds >= CPU_BOUND * self.seconds else "device memory"


@dataclass
class StepMeter:
    """Times the streams in one decode step out of `SAMPLE_EVERY`, and in every step while a trace is recorded.

    Args:
        executor: carries the steps out.

    Attributes:
        times: sums over decode steps since the engine was made.
        prefill_seconds: the time of prefill steps, which the counts below are of, too. Mixed steps are prefill steps
            that also compute tokens of running sequences; `num_mixed_tokens` counts these tokens.
        prefill_experts_read: as `DecodeTimes.experts_read`, of prefill steps.
        fetched_bytes: as in `DecodeTimes`, of all steps that were read.
        num_resident, num_streamed: full KV blocks of all running sequences that lay on the GPU in the newest step, and
            that did not.
    """

    executor: Executor
    times: DecodeTimes = field(default_factory=DecodeTimes)
    prefill_seconds: float = 0.0
    num_prefill_steps: int = 0
    num_prefill_tokens: int = 0
    num_mixed_steps: int = 0
    num_mixed_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_experts_read: int = 0
    fetched_bytes: int = 0
    trace: Trace | None = None
    num_resident: int = 0
    num_streamed: int = 0
    _num_launched: int = 0  # decode steps
    _last_read: float = 0.0  # when the newest step was read
    _experts_read: int = 0  # of all steps until then
    _open: list[tuple[Timeline, float]] = field(default_factory=list)  # with the step's seconds; copies may still run

    def note_blocks(self, num_resident: int, num_streamed: int) -> None:
        """Note where the full blocks lie of which a step was launched."""
        self.num_resident, self.num_streamed = num_resident, num_streamed

    @property
    def resident_share(self) -> float:
        """The share of these blocks that lay on the GPU."""
        num_full = self.num_resident + self.num_streamed
        return self.num_resident / num_full if num_full else 1.0

    def timeline(self, is_decode: bool) -> Timeline | None:
        """Return a timeline for the step about to be launched, or None if that step is not to be timed."""
        # The first step is not representative: it may compile kernels, and nothing was prefetched for it.
        is_sample = is_decode and self._num_launched % SAMPLE_EVERY == 1
        self._num_launched += is_decode
        timeline = self.executor.timeline() if is_sample or self.trace is not None else None
        if self.trace is not None and timeline is not None:
            self.trace.timelines.append(timeline)
        return timeline

    @contextmanager
    def span(self, name: str) -> Iterator[float]:
        """Give the time, and record what the host does inside if a trace is recorded."""
        begin = time.perf_counter()
        yield begin
        if self.trace is not None:
            self.trace.host(name, begin)

    def read(self, step: LaunchedStep) -> tuple[list[SampledToken], float]:
        """Wait for a step and count it; return what it sampled, and when that was there."""
        with self.span("wait for tokens") as begin:
            sampled, *counts = self.executor.read(step.number)
        now = time.perf_counter()
        self.count(step, now, now - begin, *counts)
        return sampled, now

    def count(
        self, step: LaunchedStep, now: float, wait_seconds: float, num_experts: int = 0, fetched_bytes: int = 0
    ) -> None:
        """Add a step that was read at `now` to the sums. The host waited for it during the last `wait_seconds`.

        num_experts, fetched_bytes: as `Executor.read` returns.
        """
        batch, seconds = step.batch, now - max(step.launched, self._last_read)
        self._last_read = now
        experts_read, self._experts_read = num_experts - self._experts_read, num_experts
        fetched, self.fetched_bytes = fetched_bytes - self.fetched_bytes, fetched_bytes
        for number, sequence in enumerate(batch.sequences if fetched else ()):  # each has chosen some of them
            sequence.fetched_bytes += (fetched + number) // len(batch.sequences)
        if batch.chunks:
            self.prefill_seconds += seconds
            self.num_prefill_steps += 1
            self.num_prefill_tokens += sum(chunk.end - chunk.begin for chunk in batch.chunks)
            self.num_mixed_steps += bool(batch.decoding)
            self.num_mixed_tokens += len(batch.decoding)
            self.prefill_experts_read += experts_read
            return
        times = self.times
        self.num_decode_tokens += len(batch.decoding)
        times.num_steps += 1
        times.experts_read += experts_read
        times.seconds += seconds
        times.host_seconds += seconds - wait_seconds
        fetch_seconds = min(seconds, fetched / self.executor.expert_link) if self.executor.expert_link else 0.0
        times.fetched_bytes += fetched
        times.fetch_seconds += fetch_seconds
        if step.streamed_bytes or fetched:
            times.num_streaming_steps += 1
            times.streaming_seconds += seconds
            times.streamed_bytes += step.streamed_bytes + fetched
        if step.timeline is not None:
            self._open.append((step.timeline, seconds))
        while self._open and self._open[0][0].is_complete:
            timeline, sampled_seconds = self._open.pop(0)
            times.sampled_seconds += sampled_seconds
            times.copy_seconds += timeline.seconds(COPY)
            times.wait_seconds += timeline.seconds(COMPUTE, waiting=True)
            times.compute_seconds += timeline.seconds(COMPUTE)
        copy_wait = seconds * times.copy_wait_fraction + fetch_seconds
        for sequence in batch.decoding if copy_wait else ():
            sequence.copy_wait_seconds += copy_wait

    def snapshot(self) -> DecodeTimes:
        """Begin a run and return the sums so far, for `DecodeTimes.since`. The run's second decode step is timed."""
        self._num_launched = 0
        return copy.copy(self.times)
