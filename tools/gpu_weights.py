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
    "ms a step": "{seconds_per_token:,.3f}",
    "x floor": "{ratio_to_floor:,.3f}",
    "GiB streamed": "{streamed_gib:,.2f}",
    "x resident": "{ratio_to_resident:,.3f}",
    "plan / peak": "{planned_to_peak:,.4f}",
}


def weights_dense(bench: Bench) -> dict:
    """The 8B shape within 8 GiB, batches of 1 and 16; all and half of its layers' weights streamed."""
    result = {}
    for name, options, batches in (
        ("8 GiB", dict(gpu_memory_limit=bench.limit(8)), (1, 16)),
        ("all streamed", dict(gpu_memory_limit=bench.limit(24), resident_weights_limit=0), (1,)),
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


def weights_sparse(bench: Bench) -> dict:
    """Sparse models within 8 and 12 GiB: whole layers stream, with all of their experts."""
    result = {}
    for gib in (8, 12):
        reset_peak(bench)
        llm = _engine(bench, "qwen3-30b-a3b", 1024, 1, gpu_memory_limit=bench.limit(gib), **INT4)
        result[f"qwen3-30b-a3b, int4, {gib} GiB, 1 x 1k"] = _steps(bench, llm, 1024, (1,))[0]
    return result


def weights_prefill(bench: Bench) -> dict:
    """A prompt of 8k tokens with all weights streamed and with none: the same tokens, and how long each takes."""
    tokens, found, answers = bench.tokens(8192), {}, []
    for name, options in (("resident", {}), ("streamed", dict(resident_weights_limit=0))):
        llm = _engine(bench, "qwen3-8b", 8192, 1, gpu_memory_limit=bench.limit(24), **options)
        rows = [measure(llm, [tokens], 4, seed=seed) for seed in range(4)][1:]
        answers.append(bench.outputs(llm, [tokens // 2]))
        streamed = llm.engine.plan.streamed_bytes
        bench.release(llm)
        found[name] = {"seconds": statistics.median(row.time_to_first_token for row in rows)}
    link = measure_floors(bench.device).link
    least = max(found["resident"]["seconds"], streamed / link)
    found["streamed"] |= {
        "ratio_to_resident": found["streamed"]["seconds"] / found["resident"]["seconds"],
        "ratio_to_floor": found["streamed"]["seconds"] / least,
        "bit_identical_to_resident": answers[0] == answers[1],
    }
    return {f"qwen3-8b, bf16, prefill of 8k, {name}": case for name, case in found.items()}


WEIGHTS = {case.__name__: case for case in (weights_dense, weights_int4, weights_sparse, weights_prefill)}


def _engine(bench: Bench, shape: str, context: int, batch: int, *, kv_tokens: int = 0, **options) -> LLM:
    if bench.scale > 1:
        shape = "tiny-sparse" if "a3b" in shape else "tiny"
    longest = bench.tokens(context) + 64
    host = 20 * 2**30 + (bench.host_bytes(shape, kv_tokens) if kv_tokens else 0)
    sizes = dict(max_model_len=longest, max_num_seqs=batch, cuda_graph_batch_sizes=sorted({1, batch}))
    return bench.llm(shape, **sizes, capture_num_tokens=[], host_memory_limit=host, **options)


def _steps(bench: Bench, llm: LLM, context: int, batches: tuple[int, ...]) -> list[dict]:
    measure(llm, [bench.tokens(context)], 4, seed=1)
    for batch in batches:
        bench.measure(llm, [bench.tokens(context)] * batch, 24)
    known = peak(llm) | {"streamed_weight_bytes": llm.engine.plan.streamed_bytes}
    return [case | known | _figures(case) for case in bench.release(llm)]


def _figures(case: dict) -> dict:
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
