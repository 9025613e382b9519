"""What a run was bound by: times of the steps and, in a sample of them, of the streams; and what follows from them."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.memory import GIB
from nanoinfer.work import shares
from offload import Runtime, Stream, Timeline

if TYPE_CHECKING:
    from nanoinfer.decode import DecodeStep
    from nanoinfer.engine import LLMEngine
    from nanoinfer.mixed import MixedStep
    from nanoinfer.prefill import PrefillStep
    from nanoinfer.runner import ModelRunner
    from nanoinfer.sequence import Sequence

SAMPLE_EVERY = 16  # decode steps; a mark costs the host a few microseconds, and there are several per ring slot
LINK_BOUND = 0.85  # share of the time in which the link is busy
CPU_BOUND = 0.9  # share of the time in which the host does not wait for the device


@dataclass
class DecodeTimes:
    """Sums over decode steps, in seconds.

    Attributes:
        seconds: from one read to the next.
        host_seconds: of these, the host did not wait for the device.
        sampled_seconds: of the steps whose streams were timed; `copy`, `wait` and `compute` are parts of these.
        copy_seconds: the link brought KV to the GPU.
        wait_seconds: compute waited for that.
        compute_seconds: compute had work.
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

    def since(self, earlier: DecodeTimes) -> DecodeTimes:
        """What was added after `earlier` was copied."""
        names = [entry.name for entry in fields(self)]
        return DecodeTimes(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def link_busy_fraction(self) -> float:
        """Share of the time in which the link brought KV."""
        return self._share(self.copy_seconds)

    @property
    def wait_fraction(self) -> float:
        """Share of the time in which compute waited for a copy."""
        return self._share(self.wait_seconds)

    @property
    def compute_busy_fraction(self) -> float:
        """Share of the time in which compute had work."""
        return self._share(self.compute_seconds)

    def _share(self, seconds: float) -> float:
        return min(1.0, seconds / self.sampled_seconds) if self.sampled_seconds else 0.0

    @property
    def bound(self) -> str:
        """What the steps were bound by: "link", "device memory", "CPU" or, where too few ran to tell, "unknown"."""
        if not self.seconds or (self.streamed_bytes and not self.sampled_seconds):
            return "unknown"
        # The link first: a host that is far ahead waits for room in the launch queue, which looks like work.
        if self.link_busy_fraction >= LINK_BOUND:
            return "link"
        return "CPU" if self.host_seconds >= CPU_BOUND * self.seconds else "device memory"


@dataclass
class StepMeter:
    """Times the streams in one decode step of `SAMPLE_EVERY`, and in every step while a trace is taken.

    Attributes:
        times: sums since the engine was made.
        resident_share: of the full KV blocks of all running sequences, the share that lay on the GPU in the newest step.
    """

    runtime: Runtime
    times: DecodeTimes = field(default_factory=DecodeTimes)
    trace: Trace | None = None
    resident_share: float = 1.0
    _num_launched: int = 0  # decode steps
    _open: list[tuple[Timeline, float]] = field(default_factory=list)  # with the step's seconds; copies may still run

    def timeline(self, is_decode: bool) -> Timeline | None:
        """A timeline for the step that is about to be launched, if it is one to be timed."""
        # The first step is no example: it may compile kernels, and has no prefetch.
        is_sample = is_decode and self._num_launched % SAMPLE_EVERY == 1
        self._num_launched += is_decode
        timeline = Timeline(self.runtime) if is_sample or self.trace is not None else None
        if self.trace is not None and timeline is not None:
            self.trace.timelines.append(timeline)
        return timeline

    def count(self, seconds: float, host_seconds: float, streamed_bytes: int, timeline: Timeline | None) -> None:
        """Notes a decode step whose tokens were read."""
        times = self.times
        times.num_steps += 1
        times.seconds += seconds
        times.host_seconds += host_seconds
        if streamed_bytes:
            times.num_streaming_steps += 1
            times.streaming_seconds += seconds
            times.streamed_bytes += streamed_bytes
        if timeline is not None:
            self._open.append((timeline, seconds))
        while self._open and self._open[0][0].is_complete:
            timeline, seconds = self._open.pop(0)
            found = timeline.summary()
            times.sampled_seconds += seconds
            times.copy_seconds += found.copy_seconds
            times.wait_seconds += found.wait_seconds
            times.compute_seconds += found.compute_seconds

    def snapshot(self) -> DecodeTimes:
        """The sums so far, for `DecodeTimes.since`. A run begins: its second decode step will be timed."""
        self._num_launched = 0
        return copy.copy(self.times)


def report(engine: LLMEngine) -> dict[str, int | float | str | list[str]]:
    """The part of `stats()` that says where the time went and what would help."""
    meter, times = engine.meter, engine.meter.times
    return {
        "kv_resident_share": meter.resident_share,
        "link_busy_fraction": times.link_busy_fraction,
        "compute_busy_fraction": times.compute_busy_fraction,
        "copy_wait_seconds": times.wait_fraction * times.seconds,
        "host_seconds": times.host_seconds,
        "bound": times.bound,
        "advice": advice(engine, times),
        "notes": notes(engine),
    }


def resident_share(engine: LLMEngine) -> float:
    """Of the full KV blocks of all running sequences, the share that lies on the GPU."""
    kv_cache = engine.runner.kv_cache
    num_resident = kv_cache.num_resident
    total = num_resident + kv_cache.num_streamed
    return num_resident / total if total else 1.0


def count_blocks_read(runner: ModelRunner, sequences: list[Sequence]) -> None:
    """Notes for each sequence of a step how many full blocks the step reads, and how many of them lie on the GPU."""
    kv_cache = runner.kv_cache
    if kv_cache.offload is None:
        return
    for sequence in sequences:
        first, full = int(kv_cache.residency.first[sequence.row]), int(kv_cache.residency.full[sequence.row])
        sequence.num_blocks_read += full
        sequence.num_resident_read += full - first


def count_streamed(runner: ModelRunner, sequences: list[Sequence], step: DecodeStep | PrefillStep | MixedStep) -> None:
    """Notes for each sequence of a step its share of what the step streams; a block that several read is shared out."""
    windows = runner.model.spec.windows
    for window, (numbers, blocks) in zip(dict.fromkeys(windows), step.readers, strict=True):
        streamed = step.plan.blocks(windows.index(window))
        if not streamed:
            continue
        block_bytes = windows.count(window) * runner.layout.layer_block_bytes
        parts = shares(streamed, numbers, blocks, len(sequences), block_bytes)
        for sequence, num_bytes in zip(sequences, parts.tolist(), strict=True):
            sequence.streamed_bytes += num_bytes


def advice(engine: LLMEngine, times: DecodeTimes) -> str:
    """What would make the decode steps faster, with figures of these."""
    if times.bound == "unknown":
        return "too few steps were decoded to tell"
    step_ms = times.seconds / times.num_steps * 1e3
    if times.bound == "link":
        per_step = times.streamed_bytes / times.num_streaming_steps
        gbps = times.streamed_bytes / times.streaming_seconds / 1e9
        fewer = "run fewer sequences at once or " if engine.plan.max_num_seqs > 1 else ""
        limit = "gpu_memory_limit" if engine.config.resident_kv_limit is None else "resident_kv_limit"
        return (
            f"{per_step / GIB:.2f} GiB of KV stream in each step of {step_ms:.1f} ms at {gbps:.1f} GB/s: {fewer}raise "
            f"{limit}, by {per_step / GIB:.2f} GiB to keep all of it; each GiB saves {GIB / gbps / 1e6:.1f} ms"
        )
    if times.bound == "device memory":
        return (
            f"steps of {step_ms:.1f} ms are at the GPU's own speed: more sequences at once raise the tokens per second"
        )
    host_ms = times.host_seconds / times.num_steps * 1e3
    if engine.runner.runtime.device.type != "cuda":
        return f"steps of {step_ms:.1f} ms are at the CPU's speed: there is no GPU"
    helps = "more sequences at once"
    if engine.config.enforce_eager:
        helps += " or enforce_eager=False"
    elif times.streamed_bytes:
        helps += " or larger ring_slot_bytes"
    return f"the host takes {host_ms:.1f} ms for each step of {step_ms:.1f} ms: {helps}"


def notes(engine: LLMEngine) -> list[str]:
    """Settings that had no effect, said plainly."""
    config, found = engine.config, []
    offload = engine.runner.offload
    if config.enable_cpu_offload == "auto" and not engine.runner.may_spill:
        found.append('enable_cpu_offload="auto" has no effect: all that can run at once fits on the GPU')
    if config.enable_cpu_offload is True and engine.meter.times.num_steps and not offload.counters.streamed_bytes:
        found.append("enable_cpu_offload=True has had no effect so far: all KV fits on the GPU")
    if not config.may_offload and offload is None:
        for name in ("host_memory_limit", "resident_kv_limit", "num_ring_slots", "ring_slot_bytes", "pin_host_memory"):
            value = getattr(config, name)
            if value != type(config).__dataclass_fields__[name].default:
                found.append(f"{name}={value!r} has no effect without enable_cpu_offload")
    return found


def run_line(engine: LLMEngine, before: DecodeTimes | None = None) -> str:
    """One line on the decode steps since `before`, or on all: what bounded them, what would help.

    Args:
        before: what `StepMeter.snapshot` returned when the run began.
    """
    times = engine.meter.times if before is None else engine.meter.times.since(before)
    link = ""
    if times.copy_seconds:
        waited = times.wait_fraction * times.seconds
        link = f" (link busy {times.link_busy_fraction:.0%} of the time, {waited:.2f} s waited for copies)"
    return "; ".join([f"bound by {times.bound}{link}: {advice(engine, times)}", *notes(engine)])


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
        lanes = {"CPU": 0}
        spans = []
        for name, begin, end in self.host_spans:
            spans.append(_span(name, number, 0, begin - self._base_moment, end - begin, {}))
        for step, timeline in enumerate(self.timelines):
            for span in timeline.spans:
                lane = lanes.setdefault(span.lane, len(lanes))
                arguments = {"step": step, "layer": span.layer, "chunk": span.chunk, "bytes": span.num_bytes or None}
                begin = span.begin.seconds_since(self._base)
                spans.append(_span(span.name, number, lane, begin, span.seconds, arguments))
        names = [_meta("process_name", number, 0, process)]
        return names + [_meta("thread_name", number, lane, name) for name, lane in lanes.items()] + spans


def write_trace(path: str | Path, events: list[dict]) -> None:
    """Writes trace events of one or more processes for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _span(name: str, process: int, lane: int, begin: float, seconds: float, arguments: dict) -> dict:
    known = {key: value for key, value in arguments.items() if value is not None}
    return dict(ph="X", name=name, pid=process, tid=lane, ts=begin * 1e6, dur=seconds * 1e6, args=known)


def _meta(kind: str, process: int, lane: int, name: str) -> dict:
    return dict(ph="M", name=kind, pid=process, tid=lane, args={"name": name})
