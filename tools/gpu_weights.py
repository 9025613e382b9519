"""Cases of `make gpu-bench` with weights that do not fit: streamed in every step, beside the floors of the same run."""

from __future__ import annotations

import statistics

from gpu_common import Bench, peak, reset_peak

from nanoinfer import LLM
from nanoinfer.measure.report import table
from nanoinfer.measure.run import measure
from nanoinfer.memory.floors import measure_floors

INT4 = dict(quantization="int4", head_quantization="int8")
COLUMNS = {
    "case": "{case}",
    "ms a step": "{seconds_per_token!m:,.3f}",
    "x floor": "{ratio_to_floor:,.3f}",
    "GiB streamed": "{streamed_gib:,.2f}",
    "x resident": "{ratio_to_resident:,.3f}",
    "plan / peak": "{planned_to_peak:,.4f}",
}


def weights_dense(bench: Bench) -> dict:
    """The 8B shape within 8 GiB, batches of 1 and 16; half of its layers' weights streamed.

    Embeddings lie on the host in all: a step of them is what is streamed. The plan makes room for one sequence; for the
    KV of 16 more weights have to go, here all that can.
    """
    result = {}
    for name, options, batches in (
        ("8 GiB", dict(gpu_memory_limit=bench.limit(8)), (1,)),
        ("8 GiB", dict(gpu_memory_limit=bench.limit(8), resident_weights_limit=0), (16,)),
        ("half streamed", dict(gpu_memory_limit=bench.limit(24), resident_weights_limit=_half(bench)), (1,)),
    ):
        reset_peak(bench)
        llm = _engine(bench, "qwen3-8b", 2048, max(batches), **options)
        found = _steps(bench, llm, 2048, batches)
        result |= {f"qwen3-8b, bf16, {name}, {batch} x 2k": case for batch, case in zip(batches, found, strict=True)}
    return result


def weights_int4(bench: Bench) -> dict:
    """The 8B shape in int4 within 4 GiB, with a context of 32k tokens, whose KV streams beside the weights."""
    context = bench.tokens(32_768)
    reset_peak(bench)
    options = dict(enable_cpu_offload=True, gpu_memory_limit=bench.limit(4), **INT4)
    llm = _engine(bench, "qwen3-8b", 32_768, 1, kv_tokens=context, **options)
    return {"qwen3-8b, int4, 4 GiB, 1 x 32k": _steps(bench, llm, 32_768, (1,))[0]}


def weights_prefill(bench: Bench) -> dict:
    """A prompt of 8k tokens with all weights streamed, with the embeddings on the host alone, and with none.

    The same tokens, how long each takes, and what a step takes with embeddings on the host.
    """
    tokens, found, steps, answers, streamed = bench.tokens(8192), {}, {}, [], 0
    for name, gib, options in (
        ("resident", 24, {}),
        ("embeddings on the host", 17, dict(max_num_batched_tokens=8192)),
        ("streamed", 24, dict(resident_weights_limit=0)),
    ):
        llm = _engine(bench, "qwen3-8b", 8192, 1, gpu_memory_limit=bench.limit(gib), **options)
        rows = [measure(llm, [tokens], 24, seed=seed) for seed in range(4)][1:]
        answers.append(bench.outputs(llm, [tokens // 2]))
        plan = llm.engine.plan
        streamed = plan.streamed_bytes or streamed
        assert not bench.is_cuda or (plan.embedding_bytes > 0) == (name != "resident"), plan.one_line("resident")
        assert not bench.is_cuda or (plan.streamed_bytes > 0) == (name == "streamed"), plan.one_line("resident")
        found[name] = {"seconds": statistics.median(row.time_to_first_token for row in rows)}
        steps[name] = peak(llm) | {"seconds_per_token": statistics.median(row.seconds_per_token for row in rows)}
        bench.release(llm)
    resident, stream = found["resident"]["seconds"], streamed / measure_floors(bench.device).link
    for name, least in (("embeddings on the host", resident), ("streamed", max(resident, stream))):
        seconds = found[name]["seconds"]
        found[name] |= {"ratio_to_resident": seconds / resident, "ratio_to_floor": seconds / least}
        steps[name]["ratio_to_resident"] = steps[name]["seconds_per_token"] / steps["resident"]["seconds_per_token"]
    for name, answer in zip(found, answers, strict=True):
        found[name]["bit_identical_to_resident"] = answer == answers[0]
    result = {f"qwen3-8b, bf16, prefill of 8k, {name}": case for name, case in found.items()}
    return result | {f"qwen3-8b, bf16, 1 x 8k, {name}": case for name, case in steps.items()}


WEIGHTS = {case.__name__: case for case in (weights_dense, weights_int4, weights_prefill)}


def _engine(bench: Bench, shape: str, context: int, batch: int, *, kv_tokens: int = 0, **options) -> LLM:
    if bench.scale > 1:
        shape = "tiny-sparse" if "a3b" in shape else "tiny"
    longest = bench.tokens(context) + 128
    host = (20 if bench.is_cuda else 2) * 2**30 + (bench.host_bytes(shape, kv_tokens) if kv_tokens else 0)
    sizes = dict(max_model_len=longest, max_num_seqs=batch, cuda_graph_batch_sizes=sorted({1, batch}))
    return bench.llm(shape, **sizes, capture_num_tokens=[], host_memory_limit=host, **options)


def _steps(bench: Bench, llm: LLM, context: int, batches: tuple[int, ...]) -> list[dict]:
    measure(llm, [bench.tokens(context)], 4, seed=1)
    for batch in batches:
        # Prefill and decode take turns: the first sequence decodes once per prefill step until the last one starts.
        chunks = batch * bench.tokens(context) // llm.engine.plan.max_num_batched_tokens
        bench.measure(llm, [bench.tokens(context)] * batch, 24 + chunks)
    known = peak(llm) | {"streamed_weight_bytes": llm.engine.plan.streamed_bytes}
    return [case | known | _figures(case) for case in bench.release(llm)]


def _figures(case: dict) -> dict:
    if case.get("problem"):
        raise RuntimeError(case["problem"])
    return {"streamed_gib": case["streamed_bytes_per_step"] / 2**30}


def _half(bench: Bench) -> int:
    """Half of the bytes that the layers of the 8B shape have."""
    return 7 * 2**30 if bench.scale == 1 else 2**20


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    empty = dict.fromkeys(
        ("seconds_per_token", "ratio_to_floor", "streamed_gib", "ratio_to_resident", "planned_to_peak")
    )
    rows = [empty | {"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    return table(rows, COLUMNS.items())
