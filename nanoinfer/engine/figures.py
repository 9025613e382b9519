"""Every figure of an engine and its server, declared once: what it is called where, its unit, its meaning, its source.

`statistics` (`stats.py`), the metrics of a server, the line of its log under load, what it publishes, the tables of the
documents and the page read this table; nobody else says what a figure means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from nanoinfer.engine.meter import DecodeTimes, StepMeter
from nanoinfer.models.base import SparseSpec

_getter = cache(attrgetter)
Engine = Any  # an `LLMEngine`, whose file imports `stats.py`, which imports this one


class Reading:
    """An engine whose figures are read, on its own thread between two steps.

    Args:
        recent: the decode steps that shares of their time are of; None: all.
        server: what counts requests, `ServedRequests`; None: there is no server, whose figures are not asked for.
        is_quick: whether the blocks that stream are those of the newest step, which costs nothing, and not counted.
    """

    def __init__(
        self, engine: Engine, recent: DecodeTimes | None = None, server: Any = None, *, is_quick: bool = False
    ) -> None:
        self.engine, self.server, self.plan, self.scheduler = engine, server, engine.plan, engine.scheduler
        self.meter, self.times, self.recent = engine.meter, engine.meter.times, recent or engine.meter.times
        self.cache, self.sparse = engine.kv_cache, engine.executor.spec.sparse
        self.gpu, self.host = self.cache.tables.gpu_blocks, self.cache.tables.lifetimes.host_blocks
        self.counted = engine.executor.counters(by_layer=not is_quick)
        self.expert_hits, to_slots, to_spare, self.expert_evictions = self.counted.slot_totals
        self.expert_fetches = to_slots + to_spare
        self.blocks = (self.meter if self.scheduler.running else StepMeter) if is_quick else self.cache.copies
        num_borrowed = len(self.host.borrowed)
        self.host_total, self.host_used = self.host.num_blocks + num_borrowed, self.host.num_used + num_borrowed
        self.host_share = self.host_used / self.host_total if self.host_total else None


class Figure(NamedTuple):
    """One figure.

    Attributes:
        name: in `stats()`, in what is published and on the page.
        kind: a COUNTER only grows, a GAUGE is a state; DETAIL: said by `stats()` alone; FACT: it never changes. A
            HISTOGRAM, and what has no `read`, is counted by the server where it happens, and stands in /metrics alone.
        unit: of the value; "share" is from 0 to 1.
        read: what gives the value: a path of attributes of `Reading`, or a function.
        metric: its name in /metrics behind the prefix; "": it is not there.
        log: its name in the log's event `load`, and behind a colon how its text says it; a counter's value is its
            growth in a second there, divided by `per`.
    """

    name: str
    kind: str
    unit: str
    meaning: str
    read: Callable[[Reading], Any] | str | None = None
    metric: str = ""
    log: str = ""
    per: float = 1.0

    @property
    def is_servers(self) -> bool:
        return self.read is None or isinstance(self.read, str) and self.read.startswith("server.")

    def value(self, reading: Reading) -> Any:
        return (_getter(self.read) if isinstance(self.read, str) else self.read)(reading)


COUNTER, GAUGE, DETAIL, FACT, HISTOGRAM = "counter", "gauge", "detail", "fact", "histogram"
# fmt: off
FIGURES = tuple(Figure(*row) for row in (
    ("num_running", GAUGE, "sequences", "Sequences that run; a request with n = 2 is two.",
     lambda r: len(r.scheduler.running), "num_requests_running", "num_running:{} running"),
    ("num_waiting", GAUGE, "sequences", "Sequences that wait for a place or for memory.",
     lambda r: len(r.scheduler.waiting), "num_requests_waiting", "num_waiting:{} waiting"),
    ("num_prompt_tokens", COUNTER, "tokens", "Tokens of the prompts that were taken.", "server.num_prompt_tokens",
     "prompt_tokens"),
    ("num_prefill_tokens", COUNTER, "tokens", "Tokens of prompts that were computed.", "meter.num_prefill_tokens", "",
     "prompt_tokens_per_second:{:.1f} tokens/s in"),
    ("prefix_cache_queried_tokens", COUNTER, "tokens", "Prompt tokens looked up in the prefix cache.",
     "cache.prefixes.num_queried_tokens", "prefix_cache_queries"),
    ("prefix_cache_hit_tokens", COUNTER, "tokens", "Prompt tokens found in the prefix cache.",
     "cache.prefixes.num_hit_tokens", "prefix_cache_hits", "cached_tokens_per_second:{:.1f} from cache"),
    ("num_generated_tokens", COUNTER, "tokens", "Generated tokens.", "server.num_generated_tokens", "generation_tokens",
     "tokens_per_second:{:.1f} out"),
    ("gpu_kv_share", GAUGE, "share", "Share of the GPU pool's blocks that requests hold.",
     lambda r: r.gpu.num_used / r.gpu.num_blocks, "kv_cache_usage_perc",
     "gpu_kv_share:KV takes {:.0%} of the GPU's blocks"),
    ("host_kv_share", GAUGE, "share", "Share of the host's KV blocks that requests hold; null: there are none.",
     "host_share", "", "host_kv_share:{:.0%} of the host's"),
    ("gpu_cached_share", GAUGE, "share", "Share of the GPU pool's blocks that only the prefix cache holds.",
     lambda r: r.gpu.num_cached / r.gpu.num_blocks, "", "gpu_cached_share:the prefix cache {:.0%}"),
    ("gpu_blocks_total", GAUGE, "blocks", "KV blocks of the GPU pool.", "gpu.num_blocks", "gpu_kv_blocks_total"),
    ("gpu_blocks_used", GAUGE, "blocks", "KV blocks of the GPU pool that requests hold.", "gpu.num_used",
     "gpu_kv_blocks_used"),
    ("gpu_blocks_free", GAUGE, "blocks", "KV blocks of the GPU pool that can be handed out, cached ones included.",
     "gpu.num_free"),
    ("gpu_blocks_cached", GAUGE, "blocks", "KV blocks of the GPU pool that only the prefix cache holds.",
     "gpu.num_cached", "gpu_kv_blocks_cached"),
    ("host_blocks_total", GAUGE, "blocks", "KV blocks on the host that can be handed out, and those borrowed beyond; 0 "
     "until memory is first pinned for offload mode or a preempted request.", "host_total", "host_kv_blocks_total"),
    ("host_blocks_used", GAUGE, "blocks", "KV blocks on the host that requests hold, preempted ones included.",
     "host_used", "host_kv_blocks_used"),
    ("host_blocks_free", GAUGE, "blocks", "KV blocks on the host that can be handed out, cached ones included.",
     "host.num_free"),
    ("host_blocks_cached", GAUGE, "blocks", "KV blocks on the host that only the prefix cache holds.",
     "host.num_cached", "host_kv_blocks_cached"),
    ("kv_blocks_resident", GAUGE, "blocks", "Full blocks of running sequences of which the GPU has a copy, too.",
     "blocks.num_resident"),
    ("kv_blocks_streamed", GAUGE, "blocks", "Host blocks that a step of all sequences streams.", "blocks.num_streamed"),
    ("kv_resident_share", GAUGE, "share", "Share of the running sequences' full KV blocks that lay on the GPU in the "
     "newest step.", "meter.resident_share", "kv_resident_share"),
    ("num_preemptions", COUNTER, "times", "Times that a sequence had to give way to others.",
     "scheduler.num_preemptions", "num_preemptions"),
    ("state_slots_total", GAUGE, "sequences", "Sequences that may have states beside attention; 0: no layer keeps any.",
     lambda r: r.plan.num_state_slots if r.cache.tables.blocks_of_state else 0),
    ("state_slots_used", GAUGE, "sequences", "Sequences that have such states.",
     lambda r: len(r.scheduler.running) if r.cache.tables.blocks_of_state else 0),
    ("num_snapshots", COUNTER, "times", "States of beginnings that were kept on the host.",
     lambda r: getattr(r.cache.prefixes.snapshots, "num_kept", 0)),
    ("streamed_bytes", COUNTER, "bytes", "Bytes of KV blocks, weights and experts that came from the host to the GPU.",
     lambda r: r.counted.streamed_bytes + r.meter.fetched_bytes, "streamed_bytes",
     "link_gbps:{:.1f} GB/s over the link", 1e9),
    ("streamed_weight_bytes", GAUGE, "bytes", "Weights that stream in each step.", "plan.streamed_bytes"),
    ("discarded_prefetch_bytes", COUNTER, "bytes", "The part of streamed_bytes that no step used.",
     "counted.discarded_bytes"),
    ("written_bytes", COUNTER, "bytes", "Bytes of KV blocks that were written to the host.", "counted.written_bytes",
     "written_bytes"),
    ("decode_streamed_bytes", COUNTER, "bytes", "The part of streamed_bytes that decode steps streamed.",
     "times.streamed_bytes"),
    ("link_gbps", GAUGE, "GB/s", "decode_streamed_bytes by the whole time of those steps, compute included: the "
     "bandwidth that was used.",
     lambda r: r.recent.streamed_bytes / r.recent.streaming_seconds / 1e9 if r.recent.streamed_bytes else 0.0),
    ("link_busy_fraction", GAUGE, "share", "Share of the decode steps' time in which the link brought KV, weights and "
     "experts: an estimate from a sample of the steps, and of experts from their bytes.", "recent.link_busy_fraction"),
    ("compute_busy_fraction", GAUGE, "share", "Share of it in which compute had work, an estimate as well.",
     "recent.compute_busy_fraction"),
    ("copy_wait_seconds", GAUGE, "seconds", "Time for which decode steps waited for the link, an estimate as well.",
     lambda r: r.times.wait_fraction * r.times.seconds),
    ("host_seconds", COUNTER, "seconds", "The part of decode_seconds in which the host did not wait for the device.",
     "times.host_seconds"),
    ("num_prefill_steps", COUNTER, "steps", "Steps that computed tokens of prompts.", "meter.num_prefill_steps"),
    ("num_mixed_steps", COUNTER, "steps", "Prefill steps that also computed the next tokens of running sequences.",
     "meter.num_mixed_steps"),
    ("num_mixed_tokens", COUNTER, "tokens", "These next tokens; no figure of decode steps has them.",
     "meter.num_mixed_tokens"),
    ("prefill_seconds", COUNTER, "seconds", "Time of prefill steps.", "meter.prefill_seconds"),
    ("prefill_graph_steps", COUNTER, "steps", "Prefill steps whose layers ran from CUDA graphs.",
     "counted.prefill_graph_steps", "prefill_graph_steps"),
    ("prefill_eager_steps", COUNTER, "steps", "Prefill steps whose layers ran without CUDA graphs.",
     "counted.prefill_eager_steps", "prefill_eager_steps"),
    ("prefill_graph_hit_rate", GAUGE, "share", "Share of prefill steps whose layers ran from CUDA graphs.",
     lambda r: r.counted.prefill_graph_steps / max(1, r.counted.prefill_graph_steps + r.counted.prefill_eager_steps)),
    ("prefill_padded_tokens", COUNTER, "tokens", "Padding of small prefill steps.", "counted.prefill_padded_tokens"),
    ("num_decode_steps", COUNTER, "steps", "Steps that computed only next tokens.", "times.num_steps"),
    ("num_decode_tokens", COUNTER, "tokens", "Tokens that decode steps computed.", "meter.num_decode_tokens"),
    ("num_drafts", COUNTER, "times", "Rows of decode steps that had drafted tokens beside them (speculative_config).",
     lambda r: r.engine.drafts.num_passes if r.engine.drafts else 0, "spec_decode_num_drafts"),
    ("num_drafted_tokens", COUNTER, "tokens", "Tokens that were drafted.",
     lambda r: r.engine.drafts.num_drafted if r.engine.drafts else 0, "spec_decode_num_draft_tokens"),
    ("num_accepted_tokens", COUNTER, "tokens", "Drafted tokens that were right, and taken.",
     lambda r: r.engine.drafts.num_accepted if r.engine.drafts else 0, "spec_decode_num_accepted_tokens"),
    ("draft_index_bytes", GAUGE, "bytes", "Host memory of what drafts are looked up in.",
     lambda r: r.engine.drafts.drafter.num_bytes if r.engine.drafts else 0),
    ("decode_seconds", COUNTER, "seconds", "Time of decode steps.", "times.seconds"),
    ("graph_replays", COUNTER, "times", "Replays of CUDA graphs in decode steps.", "counted.graph_replays"),
    ("eager_steps", COUNTER, "steps", "Decode steps whose layers ran without CUDA graphs.", "counted.eager_steps"),
    ("padded_rows", COUNTER, "rows", "Padding of decode steps.", "counted.padded_rows"),
    ("graph_bytes", GAUGE, "bytes", "GPU memory that capturing CUDA graphs took.", "counted.graph_bytes",
     "graph_bytes"),
    ("experts_read_per_layer", GAUGE, "experts", "Experts of a layer that the rows of a decode step chose together on "
     "average; 0: the model has none.", lambda r: experts_read(r.sparse, r.times)["experts_read_per_layer"],
     "experts_read_per_layer"),
    ("expert_bytes_per_step", GAUGE, "bytes", "Bytes of these in all layers.",
     lambda r: experts_read(r.sparse, r.times)["expert_bytes_per_step"]),
    ("prefill_experts_read", COUNTER, "experts", "Experts that prefill steps chose, over layers and steps.",
     "meter.prefill_experts_read"),
    ("expert_hits", COUNTER, "experts", "Chosen experts that steps of few rows found in a slot on the GPU; 0: there "
     "are no slots.", "expert_hits", "expert_hits"),
    ("expert_fetches", COUNTER, "experts", "Chosen experts that were brought from host memory.", "expert_fetches",
     "expert_fetches"),
    ("expert_evictions", COUNTER, "experts", "Experts that were put out of a slot for another.",
     "expert_evictions", "expert_evictions"),
    ("expert_hit_rate", GAUGE, "share", "Share of the chosen experts that was in a slot.",
     lambda r: r.expert_hits / max(1, r.expert_hits + r.expert_fetches)),
    ("expert_fetched_bytes", COUNTER, "bytes", "The part of streamed_bytes that are such experts.",
     "meter.fetched_bytes", "expert_fetched_bytes"),
    ("computed_ahead_tokens", COUNTER, "tokens", "Tokens computed ahead, of prompts that may come.",
     "server.ahead.num_tokens", "computed_ahead_tokens"),
    ("computed_ahead_left_out", COUNTER, "prompts", "Prompts that may come, of which a part was not computed ahead: "
     "there was no room, or a step would be long.", "server.ahead.num_left_out", "computed_ahead_left_out"),
    ("is_computing_ahead", GAUGE, "", "Whether what runs is computed ahead, for nobody yet.",
     "server.ahead.is_running"),
    ("prefix_parted_last", GAUGE, "tokens", "The newest value of prefix_parted_at_tokens.", "server.parted_last",
     "prefix_parted_last"),
    ("prefix_parted_again", COUNTER, "tokens", "Tokens of such prompts that the recent one has again: without the "
     "parting they were in the cache.", "server.parted_again", "prefix_parted_again"),
    ("mode", GAUGE, "", "Where KV may lie: resident or offload.", "engine.mode", "", "mode:{} mode"),
    ("bound", GAUGE, "", "What bound the decode steps: link, device memory, CPU, or unknown where too few ran to tell; "
     "in the log prefill, where that took more time.", "recent.bound", "", "bound:bound by {}"),
    ("step_floor_seconds", GAUGE, "seconds", "What a recent decode step takes at least, by the card's data sheet: what "
     "it brings over the link's bandwidth, or reads over the memory's; 0: none ran, or there is no GPU.",
     lambda r: step_floor_seconds(r)),
    ("expert_slots_by_layer", DETAIL, "", "The figures of experts for each layer.",
     lambda r: {one.layer: one._asdict() for one in r.counted.slots}),
    ("products_in_own_tiles", DETAIL, "", "Shapes of products, with the numbers of rows at which the library has other "
     "bits.", "counted.products_in_own_tiles"),
    ("num_streams", GAUGE, "requests", "HTTP requests that wait or run.", None, "num_http_requests_open"),
    ("responses", COUNTER, "answers", "HTTP answers, by path and status.", None, "http_responses"),
    ("completions", COUNTER, "sequences", "Completions that have ended, by finish reason: stop, length, abort (the "
     "client left), error (the engine failed).", None, "request_success"),
    ("first_token", HISTOGRAM, "seconds", "From the HTTP request to the first token.", None,
     "time_to_first_token_seconds"),
    ("per_token", HISTOGRAM, "seconds", "Mean time between the tokens of one prompt, the first not counted.", None,
     "time_per_output_token_seconds"),
    ("total", HISTOGRAM, "seconds", "From the HTTP request to its last token, of prompts that ended well.", None,
     "e2e_request_latency_seconds"),
    ("parted_at", HISTOGRAM, "tokens", "Tokens at which prompts parted from a recent one that is the same again behind "
     "that.", None, "prefix_parted_at_tokens"),
))
FACTS = tuple(Figure(name, FACT, *row) for name, *row in (
    ("model", "", "What was loaded.", lambda r: str(r.engine.config.model)),
    ("is_host", "", "Whether the CPU computes: there is no GPU then, and no link.", "engine.executor.is_host"),
    ("max_num_seqs", "sequences", "Sequences that run at once at most.", "plan.max_running"),
    ("max_model_len", "tokens", "Tokens of a prompt with its output at most.", "plan.max_model_len"),
    ("max_num_batched_tokens", "tokens", "Tokens of a prefill step at most.", "plan.max_num_batched_tokens"),
    ("block_size", "tokens", "Tokens of a KV block.", "engine.config.block_size"),
    ("block_bytes", "bytes", "A KV block in all of its layers.", "plan.block_bytes"),
    ("caches_prefixes", "", "Whether prompts are looked up in the prefix cache.", "engine.config.caches_prefixes"),
    ("budget_bytes", "bytes", "The limit of memory on the GPU.", "plan.budget_bytes"),
    ("total_bytes", "bytes", "What of it is planned for.", "plan.total_bytes"),
    ("weight_bytes", "bytes", "Weights on the GPU.", "plan.weight_bytes"),
    ("host_weight_bytes", "bytes", "Weights in host memory.", "plan.host_weight_bytes"),
    ("pool_bytes", "bytes", "The KV pool on the GPU, with what attention adds for each block.", "plan.pool_bytes"),
    ("ring_bytes", "bytes", "The ring through which KV blocks stream.", "plan.ring_bytes"),
    ("landing_bytes", "bytes", "Where streamed weights and experts land on the GPU.", "plan.landing_bytes"),
    ("host_bytes", "bytes", "KV blocks that host memory may hold.", "plan.host_bytes"),
    ("num_expert_slots", "experts", "Experts of a sparse layer that may lie on the GPU, while all lie in host memory; "
     "0: each lies on the GPU, or streams with its layer.", "plan.num_expert_slots"),
    ("num_experts", "experts", "Experts of a sparse layer.", lambda r: r.sparse.num_experts if r.sparse else 0),
    ("num_sparse_layers", "layers", "Layers with experts.", lambda r: r.sparse.num_layers if r.sparse else 0),
    ("link_bytes_per_second", "bytes", "What the link brings at most by the card's data sheet; null: there is none.",
     lambda r: None if r.engine.executor.is_host else r.engine.executor.link),
))
# fmt: on
ENGINES = tuple(one for one in FIGURES if not one.is_servers)
"""What an engine says without a server."""
PUBLISHED = tuple(one for one in FIGURES if one.read is not None and one.kind != DETAIL)
"""What a server publishes."""
DECLARED = [dict(name=one.name, kind=one.kind, unit=one.unit, meaning=one.meaning) for one in (*FACTS, *PUBLISHED)]
"""What a reader of these is told."""
BY_METRIC = {one.metric: one for one in FIGURES if one.metric}


def values(figures: Iterable[Figure], reading: Reading) -> dict[str, Any]:
    return {figure.name: figure.value(reading) for figure in figures}


def step_floor_seconds(reading: Reading) -> float:
    """Return the least time of a recent decode step, whose KV is taken to be that of the full blocks now."""
    times, executor, running = reading.recent, reading.engine.executor, len(reading.scheduler.running)
    if executor.is_host or not times.num_steps:
        return 0.0
    spec, num_blocks = executor.spec, reading.blocks.num_resident + reading.blocks.num_streamed
    if reading.engine.mode == "resident":  # each row writes to one block of a group
        num_blocks = max(0, reading.gpu.num_used - running * len(spec.kv_groups))
    read = spec.weight_bytes - spec.unread_bytes - (spec.sparse.expert_bytes if spec.sparse else 0)
    read += experts_read(spec.sparse, times)["expert_bytes_per_step"] + running * spec.state_bytes
    read += num_blocks * reading.plan.block_bytes
    fetched = times.fetched_bytes / times.num_steps
    copied = times.streamed_bytes / times.num_steps - fetched
    return max(copied / executor.link, read / executor.memory_rate) + fetched / executor.link


def experts_read(sparse: SparseSpec | None, times: DecodeTimes) -> dict[str, float]:
    """Return what decode steps read of experts; zeros of a model that has none."""
    per_step = times.experts_read / max(1, times.num_steps)
    return {
        "experts_read_per_layer": per_step / sparse.num_layers if sparse else 0.0,
        "expert_bytes_per_step": per_step * sparse.bytes_per_expert if sparse else 0.0,
    }
