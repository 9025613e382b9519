"""Traces of steps for Perfetto, with host and device on one clock."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from offload import Runtime, Stream, Timeline


@dataclass
class Trace:
    """A trace with host and device on one clock, in the trace event format of Perfetto and chrome://tracing.

    Args:
        compute: the stream on which the clocks of host and device are compared, once, while the device is idle.
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
        """Record what the host did from `begin` (time.perf_counter) until now."""
        self.host_spans.append((name, begin, time.perf_counter()))

    def events(self, process: str, number: int = 1) -> list[dict]:
        """Return everything recorded so far as trace events of one process. Waits until the device is idle."""
        self.runtime.synchronize()
        lanes = {"CPU": 0}
        spans = [(name, 0, begin - self._base_moment, end - begin, {}) for name, begin, end in self.host_spans]
        for step, timeline in enumerate(self.timelines):
            for span in timeline.spans:
                lane = lanes.setdefault(span.lane, len(lanes))
                arguments = {"step": step, "cut": span.cut, "transfer": span.number, "bytes": span.num_bytes or None}
                known = {key: value for key, value in arguments.items() if value is not None}
                spans.append((span.name, lane, span.begin.seconds_since(self._base), span.seconds, known))
        names = [("process_name", 0, process), *(("thread_name", lane, name) for name, lane in lanes.items())]
        return [dict(ph="M", name=kind, pid=number, tid=lane, args={"name": name}) for kind, lane, name in names] + [
            dict(ph="X", name=name, pid=number, tid=lane, ts=begin * 1e6, dur=seconds * 1e6, args=known)
            for name, lane, begin, seconds, known in spans
        ]


def write_trace(path: str | Path, events: list[dict]) -> None:
    """Write trace events of one or more processes for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
