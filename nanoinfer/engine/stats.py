"""An engine's statistics: counters, where the time went, and what would help."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.units import GIB, format_size
from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.models.base import SparseSpec
from nanoinfer.models.expert_slots import SlotCounts

# Share of the time; what waits for experts less than this has other things to mend.
_MUCH_WAITED = 0.1
Engine = Any  # an `LLMEngine`, whose file imports this one


def statistics(engine: Engine) -> dict[str, int | float | str | dict | list[str]]:
    """Return counters since the engine was made, and the state of both pools.

    `streamed_bytes`, and of decode steps `decode_streamed_bytes`, are all that came from host memory to the GPU: KV,
    weights, and experts that came one by one (`expert_fetched_bytes`, as far as steps have run).

    `link_gbps` is the bytes of all streaming decode steps divided by their whole time, compute included, in GB/s
    (10^9). It is the bandwidth that was used, not the bandwidth that the link is capable of.

    `num_mixed_steps` is the number of prefill steps that also computed the next tokens of running sequences, and
    `num_mixed_tokens` is the number of these tokens; the figures of decode steps do not include them.
    `prefill_graph_steps` counts prefill steps whose layers ran from graphs, `prefill_graph_hit_rate` is their share
    of all prefill steps, and `prefill_padded_tokens` counts the padding added to small steps.

    `host_blocks_*` count the blocks on the host: those that can be handed out, and what was borrowed beyond.
    `kv_resident_share` is the share of the running sequences' full KV blocks that lay on the GPU in the newest
    step. `link_busy_fraction`, `compute_busy_fraction` (of the time of decode steps) and `copy_wait_seconds` are
    estimates from a sample of the steps, and of experts that come one by one from their bytes and the link's bandwidth,
    which was measured at the start; a step waits for these. `host_seconds` is the part of `decode_seconds` in which the
    host did not wait for the device. `bound`, `advice` and `notes` say what bound the decode steps, what would help,
    and which settings had no effect.

    `experts_read_per_layer` is how many experts of a layer the rows of a decode step chose together on average, and
    `expert_bytes_per_step` their bytes in all layers. `prefill_experts_read` sums up over layers and prefill steps.
    `expert_hits`, `expert_fetches`, `expert_evictions`, `expert_fetched_bytes` say what steps of few rows found on
    the GPU with `expert_slots`, and `expert_slots_by_layer` for each layer, of steps that have run.
    """
    meter, decode = engine.meter, engine.meter.times
    return {
        "mode": engine.mode,
        "num_waiting": len(engine.scheduler.waiting),
        "num_running": len(engine.scheduler.running),
        "num_preemptions": engine.scheduler.num_preemptions,
        **_of_blocks(engine),
        **_of_transfers(engine),
        **_of_steps(engine),
        "kv_resident_share": meter.resident_share,
        "link_busy_fraction": decode.link_busy_fraction,
        "compute_busy_fraction": decode.compute_busy_fraction,
        "copy_wait_seconds": decode.wait_fraction * decode.seconds,
        "host_seconds": decode.host_seconds,
        "bound": decode.bound,
        "advice": advice(engine, decode),
        "notes": notes(engine),
    }


def _of_blocks(engine: Engine) -> dict[str, int]:
    prefixes, copies = engine.kv_cache.prefixes, engine.kv_cache.copies
    gpu_blocks, host_blocks = engine.kv_cache.tables.gpu_blocks, engine.kv_cache.tables.lifetimes.host_blocks
    return {
        "gpu_blocks_total": gpu_blocks.num_blocks,
        "gpu_blocks_used": gpu_blocks.num_used,
        "gpu_blocks_free": gpu_blocks.num_free,
        "gpu_blocks_cached": gpu_blocks.num_cached,
        "host_blocks_total": host_blocks.num_blocks + len(host_blocks.borrowed),
        "host_blocks_used": host_blocks.num_used + len(host_blocks.borrowed),
        "host_blocks_free": host_blocks.num_free,
        "host_blocks_cached": host_blocks.num_cached,
        "prefix_cache_queried_tokens": prefixes.num_queried_tokens,
        "prefix_cache_hit_tokens": prefixes.num_hit_tokens,
        "kv_blocks_resident": copies.num_resident,
        "kv_blocks_streamed": copies.num_streamed,
    }


def _of_transfers(engine: Engine) -> dict[str, int | float]:
    decode, transfer = engine.meter.times, engine.executor.counters()
    return {
        "streamed_bytes": transfer.streamed_bytes + engine.meter.fetched_bytes,
        "streamed_weight_bytes": engine.plan.streamed_bytes,
        "discarded_prefetch_bytes": transfer.discarded_bytes,
        "written_bytes": transfer.written_bytes,
        "decode_streamed_bytes": decode.streamed_bytes,
        "link_gbps": decode.streamed_bytes / decode.streaming_seconds / 1e9 if decode.streamed_bytes else 0.0,
    }


def _of_steps(engine: Engine) -> dict[str, Any]:
    counted, meter, decode = engine.executor.counters(), engine.meter, engine.meter.times
    return {
        "num_prefill_steps": meter.num_prefill_steps,
        "num_prefill_tokens": meter.num_prefill_tokens,
        "num_mixed_steps": meter.num_mixed_steps,
        "num_mixed_tokens": meter.num_mixed_tokens,
        "prefill_seconds": meter.prefill_seconds,
        "prefill_graph_steps": counted.prefill_graph_steps,
        "prefill_eager_steps": counted.prefill_eager_steps,
        "prefill_padded_tokens": counted.prefill_padded_tokens,
        "prefill_graph_hit_rate": counted.prefill_graph_steps
        / max(1, counted.prefill_graph_steps + counted.prefill_eager_steps),
        "num_decode_steps": decode.num_steps,
        "num_decode_tokens": meter.num_decode_tokens,
        "decode_seconds": decode.seconds,
        **experts_read(engine.executor.spec.sparse, decode),
        "prefill_experts_read": meter.prefill_experts_read,
        **slot_figures(counted.slots),
        "graph_replays": counted.graph_replays,
        "eager_steps": counted.eager_steps,
        "padded_rows": counted.padded_rows,
        "graph_bytes": counted.graph_bytes,
        "products_in_own_tiles": counted.products_in_own_tiles,
    }


def experts_read(sparse: SparseSpec | None, times: DecodeTimes) -> dict[str, float]:
    """Return what decode steps read of experts; zeros of a model that has none."""
    per_step = times.experts_read / max(1, times.num_steps)
    return {
        "experts_read_per_layer": per_step / sparse.num_layers if sparse else 0.0,
        "expert_bytes_per_step": per_step * sparse.bytes_per_expert if sparse else 0.0,
    }


def slot_figures(layers: list[SlotCounts]) -> dict[str, Any]:
    """Return how many of the chosen experts were found on the GPU, and what was brought; zeros without slots."""
    hits, fetches = sum(one.hits for one in layers), sum(one.to_slots + one.to_spare for one in layers)
    return {
        "expert_hits": hits,
        "expert_fetches": fetches,
        "expert_evictions": sum(one.evictions for one in layers),
        "expert_hit_rate": hits / max(1, hits + fetches),
        "expert_fetched_bytes": sum(one.fetched_bytes for one in layers),
        "expert_slots_by_layer": {one.layer: one._asdict() for one in layers},
    }


def advice(engine: Engine, times: DecodeTimes) -> str:
    """Say what would make the decode steps faster, with figures from `times`."""
    if times.bound == "unknown":
        return "too few steps were decoded to tell"
    step_ms = times.seconds / times.num_steps * 1e3
    if times.fetch_fraction >= max(_MUCH_WAITED, times.link_busy_fraction / 2):
        one_more = engine.plan.expert_bytes / engine.executor.spec.sparse.num_experts
        each, waited = times.fetched_bytes / times.num_steps, times.fetch_seconds / times.num_steps * 1e3
        return (
            f"steps of {step_ms:.1f} ms wait {waited:.1f} ms for experts that are not on the GPU, {format_size(each)} "
            f"of them: raise gpu_memory_limit, by {format_size(one_more)} for one more of each layer, or take fewer "
            "bits for the weights"
        )
    if times.bound == "link":
        per_step = (times.streamed_bytes - times.fetched_bytes) / times.num_streaming_steps
        gbps = times.streamed_bytes / times.streaming_seconds / 1e9
        weights = engine.plan.streamed_bytes
        fewer = "run fewer sequences at once or " if engine.plan.max_num_seqs > 1 else ""
        limit = "gpu_memory_limit" if engine.config.resident_kv_limit is None else "resident_kv_limit"
        what = "KV"
        if weights:
            what = "weights" if per_step < 1.01 * weights else f"weights and KV ({weights / GIB:.2f} of it weights)"
            fewer, limit = "take fewer bits for the weights, or ", "gpu_memory_limit"
        return (
            f"{per_step / GIB:.2f} GiB of {what} stream in each step of {step_ms:.1f} ms at {gbps:.1f} GB/s: {fewer}"
            f"raise {limit}, by {per_step / GIB:.2f} GiB to keep all of it; each GiB saves {GIB / gbps / 1e6:.1f} ms"
        )
    if times.bound == "device memory":
        return (
            f"steps of {step_ms:.1f} ms are at the GPU's own speed: more sequences at once raise the tokens per second"
        )
    host_ms = times.host_seconds / times.num_steps * 1e3
    if engine.executor.is_host:
        return f"steps of {step_ms:.1f} ms are at the CPU's speed: there is no GPU"
    helps = "more sequences at once"
    if engine.config.enforce_eager:
        helps += " or enforce_eager=False"
    elif times.streamed_bytes > times.fetched_bytes:
        helps += " or larger ring_slot_bytes"
    return f"the host takes {host_ms:.1f} ms for each step of {step_ms:.1f} ms: {helps}"


def notes(engine: Engine) -> list[str]:
    """Return one sentence for each setting that had no effect."""
    config, found = engine.config, []
    counted, on_gpu = engine.executor.counters(), "" if engine.executor.is_host else " on the GPU"
    if config.enable_cpu_offload == "auto" and engine.kv_cache.tables.all_rows_fit:
        found.append(f'enable_cpu_offload="auto" has no effect: all that can run at once fits{on_gpu}')
    # What is streamed beside weights is not counted apart.
    may_be_weights = counted.streamed_bytes or engine.plan.streamed_bytes
    if config.enable_cpu_offload is True and engine.meter.times.num_steps and not may_be_weights:
        found.append(f"enable_cpu_offload=True has had no effect so far: all KV fits{on_gpu}")
    if not config.may_offload and not counted.has_host_memory:
        names = "resident_kv_limit", "num_ring_slots", "ring_slot_bytes", "pin_host_memory"
        for name in names[: 3 if engine.plan.streamed_bytes else None]:
            value = getattr(config, name)
            if value != type(config).__dataclass_fields__[name].default:
                found.append(f"{name}={value!r} has no effect without enable_cpu_offload")
    return found


def run_line(engine: Engine, before: DecodeTimes | None = None) -> str:
    """Return one line about the decode steps: what bound them, what would help, and settings that had no effect.

    Args:
        before: what `StepMeter.snapshot` returned when the run began; None: all steps count.
    """
    return "; ".join([bound_line(engine, before), *notes(engine)])


def bound_line(engine: Engine, before: DecodeTimes | None = None) -> str:
    """Return what bound the decode steps and what would help, in one line; `before` as for `run_line`."""
    times = engine.meter.times if before is None else engine.meter.times.since(before)
    link = ""
    if times.copy_seconds or times.fetch_seconds:
        waited = times.wait_fraction * times.seconds
        link = f" (link busy {times.link_busy_fraction:.0%} of the time, {waited:.2f} s waited for copies)"
    experts, found = "", slot_figures(engine.executor.counters().slots)
    if found["expert_hits"] + found["expert_fetches"]:
        experts = f"; {found['expert_hit_rate']:.0%} of the chosen experts were on the GPU since the start, and "
        experts += f"{found['expert_fetched_bytes'] / GIB:,.1f} GiB were brought there"
    return f"bound by {times.bound}{link}: {advice(engine, times)}{experts}"
