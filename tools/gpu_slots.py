"""Cases of `make gpu-bench` with experts in host memory, that come one by one, beside the floors of the same run.

The floor of a step is what it brings over the link, and behind that the step with all in slots.
"""

from __future__ import annotations

import torch
from gpu_common import Bench, peak, reset_peak
from gpu_sparse import INT4, engine, prefill

from nanoinfer import LLM
from nanoinfer.measure.report import table
from nanoinfer.measure.run import measure, release
from nanoinfer.memory.floors import measure_floors

CONTEXT = 1024
BATCHES = (1, 2, 4, 16)
TOKENS = (2, 4, 8, 16)
"""Tokens that may be drawn: the fewer, the more often a step finds its experts in slots."""
COLUMNS = {
    "case": "{case}",
    "us a layer": "{microseconds_per_layer:,.1f}",
    "more than resident": "{more_than_resident:+,.1f}",
    "hits": "{hit_rate:.0%}",
    "MiB a step": "{fetched_mib:,.1f}",
    "ms a step": "{seconds_per_token!m:,.3f}",
    "x floor": "{ratio_to_floor:,.3f}",
    "prefill, tok/s": "{prefill_tokens_per_second:,.0f}",
    "plan / peak": "{planned_to_peak:,.4f}",
}


def slots_steps(bench: Bench) -> dict:
    """Steps with all experts in slots, with fewer, and with as few as a token takes; prefill with all on the host."""
    llm = _engine(bench)
    sparse = llm.engine.runner.spec.sparse
    layers, experts = sparse.num_layers, sparse.num_experts
    resident = {batch: _step(bench, llm, batch) for batch in BATCHES}
    whole = prefill(bench, llm)["seconds"]
    release(llm)
    llm = _engine(bench, expert_slots=experts)
    _bring_all(llm)
    full = {batch: _step(bench, llm, batch) for batch in BATCHES}
    release(llm)
    result, link = {}, measure_floors(bench.device).link
    for batch in BATCHES:
        seconds = full[batch]["seconds_per_token"]
        more = (seconds - resident[batch]["seconds_per_token"]) * 1e6 / layers
        result[f"all in slots, {batch} x 1k"] = full[batch] | {"more_than_resident": more}
    least = sparse.num_chosen
    some = max(least, experts // 5)
    for count in sorted({least, some, max(least, 2 * experts // 5)}):
        llm = _engine(bench, expert_slots=count)
        for batch in BATCHES if count == some else (1,):
            result[f"{count} slots, {batch} x 1k"] = _beside(_step(bench, llm, batch), full[batch], link)
        for tokens in TOKENS if count > least or count == some else ():
            found = _step(bench, llm, 1, tokens)
            result[f"{count} slots, 1 x 1k, {tokens} tokens"] = _beside(found, full[1], link)
        if count == least:
            found, plan = prefill(bench, llm), llm.engine.plan
            stream = plan.expert_bytes / link
            found |= {"ratio_to_floor": found["seconds"] / max(whole, stream)}
            result[f"{count} slots, prefill of 8k"] = found | {"resident_seconds": whole, "stream_seconds": stream}
        release(llm)
    return result


def slots_budgets(bench: Bench) -> dict:
    """Sparse models within small budgets, with the KV of a long context, and as many slots as the planner chooses."""
    result, context, link = {}, bench.tokens(32_768), measure_floors(bench.device).link
    for shape, gib, options in (
        ("qwen3-30b-a3b", 12, INT4),
        ("qwen3-30b-a3b", 8, INT4),
        ("gpt-oss-20b", 8, {}),
    ):
        reset_peak(bench)
        llm = bench.llm(
            shape if bench.scale == 1 else "tiny-sparse",
            max_model_len=context + 64,
            max_num_seqs=1,
            gpu_memory_limit=bench.limit(gib),
            **(options if bench.scale == 1 else dict(expert_slots=8)),
        )
        found = _step(bench, llm, 1, length=context)
        found |= peak(llm) | {"slots": llm.engine.plan.num_expert_slots}
        found["link_share"] = found["fetched_bytes"] / link / found["seconds_per_token"]
        result[f"{shape}, {gib} GiB, {found['slots']} slots, 1 x 32k"] = found
        release(llm)
    return result


SLOTS = {case.__name__: case for case in (slots_steps, slots_budgets)}


def _engine(bench: Bench, **options) -> LLM:
    return engine(bench, "qwen3-30b-a3b", "tiny-sparse", 28, list(BATCHES), **INT4, **options)


def _bring_all(llm: LLM) -> None:
    """Have all experts in slots."""
    runner = llm.engine.runner
    with torch.inference_mode(), runner.compute.current():
        for layer in runner.model.layers:
            experts = layer.mlp.experts
            ids = torch.arange(experts.num_experts, dtype=torch.int32, device=runner.runtime.device)
            experts.operations.place_experts(ids.view(1, -1), experts.slots)
        runner.runtime.synchronize()


def _step(bench: Bench, llm: LLM, batch: int, num_allowed: int | None = None, length: int | None = None) -> dict:
    """Return the figures of steps at the end of a run; with `num_allowed` tokens are drawn from so many."""
    batch, length = max(1, batch // bench.scale), length or bench.tokens(CONTEXT)
    sampling = dict(temperature=1.0, seed=0)  # greedy tokens would soon be the same again and again
    if num_allowed is not None:
        sampling["allowed_token_ids"] = [*range(100, 100 + num_allowed)]
    measure(llm, [length] * batch, 24, sampling=sampling)  # the slots hold what such tokens take
    before = llm.stats()
    row = measure(llm, [length] * batch, 64, seed=1, sampling=sampling)
    after = llm.stats()
    gained = {name: after[name] - before[name] for name in ("expert_hits", "expert_fetches", "expert_fetched_bytes")}
    steps = after["num_decode_steps"] - before["num_decode_steps"]
    chosen = gained["expert_hits"] + gained["expert_fetches"]
    return {
        "seconds_per_token": row.seconds_per_token,
        "prefill_tokens_per_second": row.figures().get("prefill_tokens_per_second"),
        "microseconds_per_layer": row.seconds_per_token * 1e6 / len(llm.engine.runner.spec.layers),
        "hit_rate": gained["expert_hits"] / chosen if chosen else None,
        "fetched_bytes": gained["expert_fetched_bytes"] / steps,
        "fetched_mib": gained["expert_fetched_bytes"] / steps / 2**20,
    }


def _beside(found: dict, full: dict, link: float) -> dict:
    floor = found["fetched_bytes"] / link + full["seconds_per_token"]
    return found | {"floor_seconds": floor, "ratio_to_floor": found["seconds_per_token"] / floor}


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    names = "microseconds_per_layer more_than_resident hit_rate fetched_mib seconds_per_token ratio_to_floor"
    empty = dict.fromkeys((*names.split(), "prefill_tokens_per_second", "planned_to_peak"))
    rows = [empty | {"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    return table(rows, COLUMNS.items())
