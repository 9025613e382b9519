"""What each stream did and when, for one step. Recorded only on request, since every mark costs the host time."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.runtime.base import Event, Runtime, Stream

COMPUTE, COPY, WRITE = "compute", "copy (host to GPU)", "write (GPU to host)"
WAIT = "wait for copy"


@dataclass(frozen=True)
class Span:
    """Work between two points of one stream."""

    lane: str
    name: str
    begin: Event
    end: Event
    num_bytes: int = 0
    cut: int | None = None  # at which the work is wanted, or behind it; of write-through, the layer with attention
    number: int | None = None  # running number within the step, or within the next step where it is prefetched

    @property
    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)


class NoTimeline:
    """Records nothing. An untimed step gets this object, so that the engine need not check."""

    def begin(self, stream: Stream, lane: str) -> None:
        pass

    # Called several times for each ring slot of every step: with ** the host would take three times as long.
    def lap(self, stream: Stream, lane: str, name: str, num_bytes: int = 0, cut: int = 0, number: int = 0) -> None:
        pass


@dataclass
class Timeline(NoTimeline):
    """Spans of one step, on the lanes compute, copy and write.

    The spans of a lane follow each other: `begin` marks a point of the stream, and each `lap` ends a span that began at
    the mark before.
    """

    runtime: Runtime
    spans: list[Span] = field(default_factory=list)
    _marks: dict[str, Event] = field(default_factory=dict)

    def begin(self, stream: Stream, lane: str) -> None:
        """Mark where the next span of the lane begins."""
        self._marks[lane] = self._mark(stream)

    def lap(self, stream: Stream, lane: str, name: str, **details: int) -> None:
        """End a span here; the next one may begin at the same point. details: as in `Span`."""
        end = self._mark(stream)
        self.spans.append(Span(lane, name, self._marks[lane], end, **details))
        self._marks[lane] = end

    def _mark(self, stream: Stream) -> Event:
        event = self.runtime.event(timed=True)
        stream.record(event)
        return event

    @property
    def is_complete(self) -> bool:
        """Whether everything marked has run, so that the spans have times."""
        return all(event.query(None) for event in self._marks.values())

    def seconds(self, lane: str, *, waiting: bool = False) -> float:
        """Return how long a lane of a complete step was busy, or, with `waiting`, waited for fills.

        Compute counts as busy also with work that the host had not launched yet.
        """
        return sum(span.seconds for span in self.spans if span.lane == lane and (span.name == WAIT) == waiting)
