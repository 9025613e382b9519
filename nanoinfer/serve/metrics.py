"""The metrics of /metrics in Prometheus' text format; the names follow vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.partings import Parting

PREFIX = "nanoinfer:"
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_PER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10, 20, 40,
)  # fmt: skip
_TOKEN_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_TOTAL_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

# Name, help text, the entry of `LLMEngine.stats` or of `ServerMetrics.render`.
_GAUGES = (
    ("num_requests_running", "Sequences that run.", "num_running"),
    ("num_requests_waiting", "Sequences that wait for a place or for memory.", "num_waiting"),
    ("gpu_kv_blocks_used", "KV blocks of the GPU pool that requests hold.", "gpu_blocks_used"),
    ("gpu_kv_blocks_cached", "KV blocks of the GPU pool that only the prefix cache holds.", "gpu_blocks_cached"),
    ("gpu_kv_blocks_total", "KV blocks of the GPU pool.", "gpu_blocks_total"),
    ("host_kv_blocks_used", "KV blocks on the host that requests hold, preempted ones included.", "host_blocks_used"),
    ("host_kv_blocks_cached", "KV blocks of the host pool that only the prefix cache holds.", "host_blocks_cached"),
    (
        "host_kv_blocks_total",
        "KV blocks on the host; 0 until offload mode is first entered or a request is preempted.",
        "host_blocks_total",
    ),
    ("graph_bytes", "GPU memory that capturing CUDA graphs took.", "graph_bytes"),
    ("kv_cache_usage_perc", "Share of the GPU pool in use, 0 to 1.", "gpu_share"),
    ("num_http_requests_open", "HTTP requests that wait or run.", "num_streams"),
    (
        "experts_read_per_layer",
        "Experts of a layer that a decode step reads on average; 0: the model has none.",
        "experts_read_per_layer",
    ),
    ("kv_resident_share", "Share of the running sequences' full KV blocks that lies on the GPU.", "kv_resident_share"),
)
_COUNTERS = (
    ("num_preemptions", "Times that a sequence had to give way to others.", "num_preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queried_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    ("computed_ahead_tokens", "Tokens computed ahead, of prompts that may come.", "computed_ahead_tokens"),
    (
        "computed_ahead_left_out",
        "Prompts that may come, of which a part was not computed ahead: there was no room, or a step would be long.",
        "computed_ahead_left_out",
    ),
    ("prefill_graph_steps", "Prefill steps whose layers ran from CUDA graphs.", "prefill_graph_steps"),
    ("prefill_eager_steps", "Prefill steps whose layers ran without CUDA graphs.", "prefill_eager_steps"),
    ("streamed_bytes", "Bytes of KV blocks, weights and experts that came from the host to the GPU.", "streamed_bytes"),
    ("expert_hits", "Chosen experts that were in a slot on the GPU; 0: there are no slots.", "expert_hits"),
    ("expert_fetches", "Chosen experts that were brought from host memory.", "expert_fetches"),
    ("expert_evictions", "Experts that were put out of a slot for another.", "expert_evictions"),
    ("expert_fetched_bytes", "The part of streamed_bytes that are such experts.", "expert_fetched_bytes"),
    ("written_bytes", "Bytes of KV blocks that were written to the host.", "written_bytes"),
    ("prompt_tokens", "Tokens of the prompts that were taken.", "num_prompt_tokens"),
    ("generation_tokens", "Generated tokens.", "num_generated_tokens"),
)


class ServerMetrics:
    """Counters of one server, in their own registry, so that several servers can live in one process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stats: dict[str, Any] = {}
        self._registry = CollectorRegistry()
        self._responses = Counter(
            PREFIX + "http_responses", "HTTP answers.", ["path", "status"], registry=self._registry
        )
        self._completions = Counter(
            PREFIX + "request_success",
            "Completions that have ended, by finish reason; abort: the client left, error: the engine failed.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the HTTP request to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of one prompt, the first not counted.",
            _PER_TOKEN_BUCKETS,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds", "From the HTTP request to its last token, of prompts that ended well.",
            _TOTAL_BUCKETS,
        )  # fmt: skip
        self._parted = self._histogram(
            "prefix_parted_at_tokens",
            "Tokens at which prompts parted from a recent one that is the same again behind that.",
            _TOKEN_BUCKETS,
        )
        self._parted_last = Gauge(
            PREFIX + "prefix_parted_last", "The newest value of prefix_parted_at_tokens.", registry=self._registry
        )
        self._parted_again = Counter(
            PREFIX + "prefix_parted_again",
            "Tokens of such prompts that the recent one has again: without the parting they were in the cache.",
            registry=self._registry,
        )
        self._registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

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
        self._parted_last.set(parting.at)
        self._parted_again.inc(parting.num_again)

    def render(self, stats: dict[str, Any]) -> bytes:
        """Return the metrics as text; `stats` is the result of `LLMEngine.stats`."""
        self._stats = stats | {
            "gpu_share": stats["gpu_blocks_used"] / stats["gpu_blocks_total"],
            "num_streams": self._engine.num_streams,
            "num_prompt_tokens": self._engine.requests.num_prompt_tokens,
            "num_generated_tokens": self._engine.requests.num_generated_tokens,
        }
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the engine; called by prometheus_client."""
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, entry in rows:
                if self._stats:
                    yield kind(PREFIX + name, text, self._stats[entry])
