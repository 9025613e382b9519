"""Cases of `make gpu-bench` with experts in host memory, that come one by one, beside the floors of the same run.

The floor of a step is what it brings at the rate of the kernels that bring it, measured in the same run, and behind
that the step with all in slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from gpu_common import Bench, peak, reset_peak
from gpu_sparse import INT4, engine, prefill

from nanoinfer import LLM
from nanoinfer.execution.prefill import PrefillProgram, PrefillStep
from nanoinfer.measure.locality import PUBLISHED, sampling_of
from nanoinfer.measure.report import table
from nanoinfer.measure.run import measure, release
from nanoinfer.memory.floors import measure_floors
from nanoinfer.step.plan import StepPlan
from offload import StreamPlan

CONTEXT = 1024
BATCHES = (1, 2, 4, 16)
LOCALITIES = {"uniform": 0.0, "as published": PUBLISHED}
"""How often drawn tokens, and so chosen experts, are of a working set; see `nanoinfer.measure.locality`."""
COLUMNS = {
    "case": "{case}",
    "us a layer": "{microseconds_per_layer:,.1f}",
    "more than resident": "{more_than_resident:+,.1f}",
    "hits": "{hit_rate:.0%}",
    "MiB a step": "{fetched_mib:,.1f}",
    "ms a step": "{seconds_per_token!m:,.3f}",
    "mean": "{mean_seconds!m:,.3f}",
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
    gather = _gather_rate(llm)
    release(llm)
    result, link = {}, measure_floors(bench.device).link
    result["rates"] = {"gather_gbps": gather / 1e9, "link_gbps": link / 1e9}
    for batch in BATCHES:
        seconds = full[batch]["seconds_per_token"]
        more = (seconds - resident[batch]["seconds_per_token"]) * 1e6 / layers
        result[f"all in slots, {batch} x 1k"] = full[batch] | {"more_than_resident": more}
    least = sparse.num_chosen
    some = max(least, experts // 5)
    for count in sorted({least, some, max(least, 2 * experts // 5)}):
        llm = _engine(bench, expert_slots=count)
        for name, locality in LOCALITIES.items() if count > least or count == some else [("uniform", 0.0)]:
            for batch in BATCHES if count == some and not locality else (1,):
                found = _step(bench, llm, batch, locality)
                result[f"{count} slots, {batch} x 1k, {name}"] = _beside(found, full[batch], gather)
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
        ("gpt-oss-120b", 22, {}),
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


def slots_hybrid(bench: Bench) -> dict:
    """A sparse model whose other layers keep states, within small budgets, experts chosen as published: beside the
    step with all experts there, and the rate of the kernels that bring them."""
    context = bench.tokens(32_768)
    shape, options = ("qwen3.6-35b-a3b", INT4) if bench.scale == 1 else ("tiny-sparse", {})
    sizes = dict(max_model_len=context + 256, max_num_seqs=1, cuda_graph_batch_sizes=[1], **options)
    llm = bench.llm(shape, gpu_memory_limit=bench.limit(40), expert_slots=256 if bench.scale == 1 else 16, **sizes)
    _bring_all(llm)
    result, full, gather = {}, _step(bench, llm, 1, PUBLISHED, context), _gather_rate(llm)
    result["rates"] = {"gather_gbps": gather / 1e9}
    result[f"{shape}, all in slots, 1 x 32k"] = full
    release(llm)
    for gib in (12, 8):
        reset_peak(bench)
        some = {} if bench.scale == 1 else dict(expert_slots=8)
        llm = bench.llm(shape, gpu_memory_limit=bench.limit(gib), **sizes, **some)
        found = _beside(_step(bench, llm, 1, PUBLISHED, context), full, gather)
        found |= peak(llm) | {"slots": llm.engine.plan.num_expert_slots}
        result[f"{shape}, {gib} GiB, {found['slots']} slots, 1 x 32k, as published"] = found
        release(llm)
    return result


def slots_million(bench: Bench) -> dict:
    """The same model with 1,048,576 tokens within 24 GiB, of which all but the last step's are not computed: their keys
    and values are zeros. Beside them a prompt of 131,072 that is computed."""
    shape, options = ("qwen3.6-35b-a3b", INT4) if bench.scale == 1 else ("tiny-sparse", {})
    result, full, gather = {}, {}, 1.0
    longest = dict(hf_overrides={"max_position_embeddings": 2**21})
    for gib, tokens in ((80, 2**20), (24, 2**20), (24, 2**17)):
        length, is_first = bench.tokens(tokens), gib == 80
        slots = dict(expert_slots=(256 if is_first else 8) if bench.scale == 1 else (16 if is_first else 8))
        sizes = dict(max_model_len=length + 256, max_num_seqs=1, cuda_graph_batch_sizes=[1], capture_num_tokens=[])
        reset_peak(bench)
        llm = bench.llm(
            shape, gpu_memory_limit=bench.limit(gib), **sizes, **options, **longest,
            **(slots if is_first or bench.scale > 1 else {}),
        )  # fmt: skip
        if is_first:
            _bring_all(llm)
        with uncomputed() if tokens == 2**20 else nullcontext():
            found = _step(bench, llm, 1, PUBLISHED, length)
        if is_first:
            full, gather = found, _gather_rate(llm)
        elif tokens == 2**20:
            found = _beside(found, full, gather)
        found |= peak(llm) | {"slots": llm.engine.plan.num_expert_slots}
        if tokens == 2**20:
            found["prefill_tokens_per_second"] = None
        result[f"{shape}, {gib} GiB, {found['slots']} slots, 1 x {length:,}"] = found
        release(llm)
    return result


@contextmanager
def uncomputed() -> Iterator[None]:
    """Have steps of prompts that give no token leave the memory of their tokens as it is."""
    begin = PrefillProgram.begin

    def begun(program: PrefillProgram, plan: StepPlan, logits: torch.Tensor) -> PrefillStep:
        step = begin(program, plan, logits)
        if not len(plan.sampled_rows):
            program.resources.states.reset(step.begun)
            step.stream_plan, step.ahead = StreamPlan(((),) * len(step.stream_plan.at)), None
            step.compute = lambda section: None
        return step

    PrefillProgram.begin = begun
    try:
        yield
    finally:
        PrefillProgram.begin = begin


SLOTS = {case.__name__: case for case in (slots_steps, slots_budgets)}
HYBRIDS = {case.__name__: case for case in (slots_hybrid, slots_million)}


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


def _gather_rate(llm: LLM) -> float:
    """Return bytes per second of the kernels that bring experts: of each layer as a token takes, all missing."""
    runner, seconds = llm.engine.runner, []
    owners = [layer.mlp.experts for layer in runner.model.layers]
    ids = torch.arange(runner.spec.sparse.num_chosen, dtype=torch.int32, device=runner.runtime.device).view(1, -1)
    with torch.inference_mode(), runner.compute.current():
        for _ in range(5):
            runner.model.streamed.forget_slots()
            runner.runtime.synchronize()
            begin = time.perf_counter()
            for experts in owners:
                experts.operations.place_experts(ids, experts.slots)
            runner.runtime.synchronize()
            seconds.append(time.perf_counter() - begin)
        runner.model.streamed.forget_slots()
    return ids.numel() * sum(experts.stride for experts in owners) / min(seconds)


def _step(bench: Bench, llm: LLM, batch: int, locality: float = 0.0, length: int | None = None) -> dict:
    """Return the figures of steps at the end of a run, whose tokens are drawn with a locality."""
    batch, length = max(1, batch // bench.scale), length or bench.tokens(CONTEXT)
    warm_up, steps = (24, 200) if bench.scale == 1 else (4, 12)
    # The slots hold what such tokens take when the second run begins.
    measure(llm, [length] * batch, warm_up, sampling=sampling_of(llm, locality, 0))
    row = measure(llm, [length] * batch, steps, seed=1, sampling=sampling_of(llm, locality, 1))
    fetched = row.expert_fetched_bytes_per_step or 0.0
    return {
        "seconds_per_token": row.seconds_per_token,
        # A step brings nothing or much, so what is beside the bytes of all steps is the mean of all steps.
        "mean_seconds": statistics.fmean(row.steps),
        "prefill_tokens_per_second": row.figures().get("prefill_tokens_per_second"),
        "microseconds_per_layer": row.seconds_per_token * 1e6 / len(llm.engine.runner.spec.layers),
        "hit_rate": row.expert_hit_rate,
        "fetched_bytes": fetched,
        "fetched_mib": fetched / 2**20,
    }


def _beside(found: dict, full: dict, rate: float) -> dict:
    floor = found["fetched_bytes"] / rate + full["seconds_per_token"]
    return found | {"floor_seconds": floor, "ratio_to_floor": found["mean_seconds"] / floor}


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    names = (
        "microseconds_per_layer more_than_resident hit_rate fetched_mib seconds_per_token mean_seconds ratio_to_floor"
    )
    empty = dict.fromkeys((*names.split(), "prefill_tokens_per_second", "planned_to_peak"))
    rows = [empty | {"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    return table(rows, COLUMNS.items())
