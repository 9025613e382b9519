"""An engine's statistics: its figures, what bound its steps, and what would help."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.units import GIB, format_size
from nanoinfer.engine.figures import ENGINES, Reading, values
from nanoinfer.engine.meter import DecodeTimes

# Share of the time; what waits for experts less than this has other things to mend.
_MUCH_WAITED = 0.1
Engine = Any  # an `LLMEngine`, whose file imports this one


def statistics(engine: Engine) -> dict[str, Any]:
    """Return what `FIGURES` declares of an engine, by name, since it was made; also `advice` and `notes`: what would
    make its decode steps faster, and which settings had no effect."""
    return values(ENGINES, Reading(engine)) | {"advice": advice(engine, engine.meter.times), "notes": notes(engine)}


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
        fewer = "run fewer sequences at once or " if engine.plan.max_running > 1 else ""
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
        return f"a step takes {step_ms:.1f} ms, as there is no GPU"
    helps = "run more sequences at once"
    if engine.config.enforce_eager:
        helps += " or leave enforce_eager out"
    elif times.streamed_bytes > times.fetched_bytes:
        helps += " or raise ring_slot_bytes"
    return f"the CPU takes {host_ms:.1f} of a step's {step_ms:.1f} ms: {helps}"


def notes(engine: Engine) -> list[str]:
    """Return one sentence for each setting that had no effect."""
    config, found = engine.config, []
    counted, on_gpu = engine.executor.counters(), "" if engine.executor.is_host else " on the GPU"
    if config.enable_cpu_offload == "auto" and engine.kv_cache.tables.all_sequences_fit:
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
    experts, (hits, to_slots, to_spare, _) = "", engine.executor.counters().slot_totals
    if chosen := hits + to_slots + to_spare:
        experts = f"; {hits / chosen:.0%} of the chosen experts were on the GPU since the start, and "
        experts += f"{engine.meter.fetched_bytes / GIB:,.1f} GiB were brought there"
    return f"bound by {times.bound}: {advice(engine, times)}{experts}{link}"
