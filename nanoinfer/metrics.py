"""What a run was bound by: sampled times of the streams, and what follows from them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offload import OffloadEngine, Runtime, StepTimes, Stream, Timeline

if TYPE_CHECKING:
    from nanoinfer.engine import LLMEngine

SAMPLE_EVERY = 16  # streaming decode steps; a mark costs the host a few microseconds, several per ring slot
LINK_BOUND = 0.85  # share of a step in which the link is busy
CPU_BOUND = 0.9  # share of a step in which the host launches it
GIB = 2**30


@dataclass
class StepMeter:
    """Times one step in `SAMPLE_EVERY`, and every step while a trace is taken.

    Attributes:
        sampled: sums over the timed decode steps that streamed something.
        launch_seconds: host time of all decode launches.
        decode_seconds: of all decode steps, from one read to the next; `streaming_seconds`: of those that streamed.
    """

    runtime: Runtime
    trace: Trace | None = None
    sampled: StepTimes = field(default_factory=lambda: StepTimes(0.0, 0.0, 0.0))
    launch_seconds: float = 0.0
    decode_seconds: float = 0.0
    streaming_seconds: float = 0.0
    _num_streaming: int = 0
    _open: list[Timeline] = field(default_factory=list)  # of decode steps whose work may still run

    def timeline(self, offload: OffloadEngine | None, is_decode: bool) -> Timeline | None:
        """A timeline for the step that is about to be launched, if it is one to be timed."""
        is_sample = offload is not None and is_decode and self._num_streaming % SAMPLE_EVERY == 1
        return Timeline(self.runtime) if is_sample or self.trace is not None else None

    def launched(self, timeline: Timeline | None, is_decode: bool, streamed_bytes: int) -> None:
        """Notes a launched step."""
        self._num_streaming += is_decode and streamed_bytes > 0
        if timeline is None:
            return
        if is_decode and streamed_bytes:
            self._open.append(timeline)
        if self.trace is not None:
            self.trace.timelines.append(timeline)

    def read(self, seconds: float, launch_seconds: float, streamed_bytes: int) -> None:
        """Notes a decode step whose tokens were read."""
        self.decode_seconds += seconds
        self.launch_seconds += launch_seconds
        self.streaming_seconds += seconds if streamed_bytes else 0.0
        while self._open and self._open[0].is_complete:
            times, total = self._open.pop(0).summary(), self.sampled
            self.sampled = StepTimes(
                total.seconds + times.seconds,
                total.copy_seconds + times.copy_seconds,
                total.wait_seconds + times.wait_seconds,
            )

    @property
    def link_busy_fraction(self) -> float:
        """Of the time of streaming decode steps, the share in which the link was busy."""
        return min(1.0, self.sampled.copy_seconds / self.sampled.seconds) if self.sampled.seconds else 0.0

    @property
    def wait_fraction(self) -> float:
        """Of the time of streaming decode steps, the share in which compute waited for a copy."""
        return self.sampled.wait_seconds / self.sampled.seconds if self.sampled.seconds else 0.0

    @property
    def bound(self) -> str:
        """What the decode steps were bound by: "link", "device memory", "CPU" or, before the first one, "unknown"."""
        if not self.decode_seconds:
            return "unknown"
        # A host far ahead waits for room in the launch queue: only where the link idles does its time count.
        if self.streaming_seconds > 0.5 * self.decode_seconds and self.link_busy_fraction >= LINK_BOUND:
            return "link"
        return "CPU" if self.launch_seconds >= CPU_BOUND * self.decode_seconds else "device memory"


def report(engine: LLMEngine) -> dict[str, int | float | str | list[str]]:
    """The part of `stats()` that says where the time went and what would help."""
    meter = engine.meter
    return {
        "kv_resident_share": resident_share(engine),
        "link_busy_fraction": meter.link_busy_fraction,
        "copy_wait_seconds": meter.wait_fraction * meter.streaming_seconds,
        "launch_seconds": meter.launch_seconds,
        "bound": meter.bound,
        "advice": advice(engine),
        "notes": notes(engine),
    }


def resident_share(engine: LLMEngine) -> float:
    """Of the full KV blocks of all running sequences, the share that lies on the GPU."""
    residency = engine.runner.kv_cache.residency
    total = residency.num_resident + residency.num_streamed
    return residency.num_resident / total if total else 1.0


def advice(engine: LLMEngine) -> str:
    """What would make the decode steps faster, with figures of the run so far."""
    meter, times = engine.meter, engine.times
    if meter.bound == "unknown":
        return "nothing was decoded yet"
    if meter.bound == "link":
        steps = max(1, times.num_streaming_steps)
        per_step = times.decode_streamed_bytes / steps
        seconds = times.streaming_decode / steps
        return (
            f"{per_step / GIB:.2f} GiB of KV stream in each step of {seconds * 1e3:.1f} ms: each GiB more of "
            f"gpu_memory_limit saves {GIB / per_step * seconds * 1e3:.1f} ms, until nothing streams"
        )
    steps = max(1, times.num_decode_steps)
    step = f"steps of {meter.decode_seconds / steps * 1e3:.1f} ms"
    if meter.bound == "CPU":
        return (
            f"the host needs {meter.launch_seconds / steps * 1e3:.1f} ms to launch {step}: more sequences at once, "
            "larger ring_slot_bytes, or enforce_eager=False"
        )
    return f"{step} run as fast as the GPU computes: more sequences at once raise the tokens per second"


def notes(engine: LLMEngine) -> list[str]:
    """Settings that had no effect, said plainly."""
    config, found = engine.config, []
    offload = engine.runner.offload
    if config.enable_cpu_offload == "auto" and not engine.runner.may_spill:
        found.append('enable_cpu_offload="auto" has no effect: all that can run at once fits on the GPU')
    if config.enable_cpu_offload is True and engine.times.num_decode_steps and not offload.counters.streamed_bytes:
        found.append("enable_cpu_offload=True has had no effect so far: all KV fits on the GPU")
    if not config.may_offload and offload is None:
        for name in ("host_memory_limit", "resident_kv_limit", "ring_slot_bytes"):
            if getattr(config, name) is not None:
                found.append(f"{name}={getattr(config, name)!r} has no effect without enable_cpu_offload")
    return found


def run_line(engine: LLMEngine) -> str:
    """One line on the run so far."""
    meter = engine.meter
    link = ""
    if meter.sampled.seconds:
        waited = meter.wait_fraction * meter.streaming_seconds
        link = f" (link busy {meter.link_busy_fraction:.0%} of the time, {waited:.2f} s waited for copies)"
    return "; ".join([f"bound by {meter.bound}{link}: {advice(engine)}", *notes(engine)])


@dataclass
class Trace:
    """Steps on one clock, in the trace event format that Perfetto and chrome://tracing open.

    Args:
        compute: the stream on which the clocks of host and device are compared once, when nothing runs.
    """

    runtime: Runtime
    compute: Stream
    timelines: list[Timeline] = field(default_factory=list)
    host_spans: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin and end by perf_counter

    def __post_init__(self) -> None:
        self.runtime.synchronize()
        self._base = self.runtime.event(timed=True)
        self.compute.record(self._base)
        self.runtime.synchronize()
        self._base_moment = time.perf_counter()

    def host(self, name: str, begin: float) -> None:
        """Notes what the host did from `begin` (time.perf_counter) until now."""
        self.host_spans.append((name, begin, time.perf_counter()))

    def events(self, process: str, number: int = 1) -> list[dict]:
        """Everything so far, as trace events of one process. Waits until the device is idle."""
        self.runtime.synchronize()
        lanes = {"host": 0}
        spans = []
        for name, begin, end in self.host_spans:
            spans.append(_span(name, number, 0, begin - self._base_moment, end - begin, {}))
        for timeline in self.timelines:
            for span in timeline.spans:
                lane = lanes.setdefault(span.lane, len(lanes))
                arguments = {"layer": span.layer, "bytes": span.num_bytes or None}
                begin = span.begin.seconds_since(self._base)
                spans.append(_span(span.name, number, lane, begin, span.seconds, arguments))
        names = [_meta("process_name", number, 0, process)]
        return names + [_meta("thread_name", number, lane, name) for name, lane in lanes.items()] + spans


def write_trace(path: str | Path, events: list[dict]) -> None:
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _span(name: str, process: int, lane: int, begin: float, seconds: float, arguments: dict) -> dict:
    known = {key: value for key, value in arguments.items() if value is not None}
    return dict(ph="X", name=name, pid=process, tid=lane, ts=begin * 1e6, dur=seconds * 1e6, args=known)


def _meta(kind: str, process: int, lane: int, name: str) -> dict:
    return dict(ph="M", name=kind, pid=process, tid=lane, args={"name": name})
