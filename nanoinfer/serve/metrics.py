"""The metrics of /metrics in Prometheus' text format; the names follow vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanoinfer.engine.figures import BY_METRIC, COUNTER, GAUGE, PUBLISHED
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.partings import Parting
from nanoinfer.serve.published import Published

T = TypeVar("T")
PREFIX = "nanoinfer:"
_FAMILIES = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily}
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_PER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10, 20, 40,
)  # fmt: skip
_TOKEN_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_TOTAL_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class ServerMetrics:
    """Counters of one server, in their own registry, so that several servers can live in one process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._figures: dict[str, Any] = {}
        self._registry = CollectorRegistry()
        self._responses = self._own(Counter, "http_responses", labelnames=["path", "status"])
        self._completions = self._own(Counter, "request_success", labelnames=["finished_reason"])
        self._first_token = self._own(Histogram, "time_to_first_token_seconds", buckets=_FIRST_TOKEN_BUCKETS)
        self._per_token = self._own(Histogram, "time_per_output_token_seconds", buckets=_PER_TOKEN_BUCKETS)
        self._total = self._own(Histogram, "e2e_request_latency_seconds", buckets=_TOTAL_BUCKETS)
        self._parted = self._own(Histogram, "prefix_parted_at_tokens", buckets=_TOKEN_BUCKETS)
        self._own(Gauge, "num_http_requests_open").set_function(lambda: engine.num_streams)
        self._registry.register(self)

    def _own(self, kind: type[T], name: str, **others: Any) -> T:
        """Return what this server counts by itself; what it means is declared with the other figures."""
        return kind(PREFIX + name, BY_METRIC[name].meaning, registry=self._registry, **others)

    def count_response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def observe(self, ended: EndedRequest) -> None:
        """Count one prompt that has ended."""
        for reason in ended.reasons:
            self._completions.labels(reason).inc()
        if ended.first_token is not None:
            self._first_token.observe(ended.first_token)
        if ended.per_token is not None:
            self._per_token.observe(ended.per_token)
        if not {"abort", "error"}.intersection(ended.reasons):
            self._total.observe(ended.total)

    def observe_parting(self, parting: Parting) -> None:
        """Count one prompt that parted from a recent one. May be called on any thread."""
        self._parted.observe(parting.at)

    def render(self, published: Published) -> bytes:
        """Return the metrics as text."""
        self._figures = published.figures
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are published; called by prometheus_client."""
        for figure in PUBLISHED if self._figures else ():
            if figure.metric:
                yield _FAMILIES[figure.kind](PREFIX + figure.metric, figure.meaning, self._figures[figure.name])
