#!/usr/bin/env python
"""Sparse models on a GPU: microseconds a layer, which is a whole step divided by the layers.

python tools/gpu_sparse.py --quick            (steps alone, in some 90 seconds)

All of it is a part of its own of `make gpu-bench`: python tools/gpu_bench.py --part sparse
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from gpu_common import Bench, peak, reset_peak  # noqa: E402

from nanoinfer import LLM  # noqa: E402
from nanoinfer.bench.hf import load_reference, measure_reference  # noqa: E402
from nanoinfer.measure.report import table, versions  # noqa: E402
from nanoinfer.measure.run import free_memory, measure, release  # noqa: E402
from nanoinfer.models.base import ModelSpec  # noqa: E402
from nanoinfer.models.shapes import UNLIMITED, write_shape  # noqa: E402

INT4 = dict(quantization="int4", head_quantization="int8")
# Of shapes without their experts: Gemma's MLP stands beside eight experts, LFM2's layers take four of them.
WITHOUT_EXPERTS = {
    "gemma-4-26b-a4b": dict(enable_moe_block=False, intermediate_size=2112 + 8 * 704),
    "lfm2-8b-a1b": dict(num_dense_layers=24, intermediate_size=4 * 1792),
    "lfm2-24b-a2b": dict(num_dense_layers=40, intermediate_size=4 * 1536),
}
# Beside Qwen3-30B-A3B: a dense model that reads as many bytes for a token.
DENSE = UNLIMITED | dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False)
CONTEXT, PREFILL = 1024, 8192
COLUMNS = {
    "case": "{case}",
    "us a layer": "{microseconds_per_layer:,.1f}",
    "more than dense": "{more_than_dense:+,.1f}",
    "ms a step": "{seconds_per_token!m:,.3f}",
    "x floor": "{ratio_to_floor:,.2f}",
    "prefill, tok/s": "{prefill_tokens_per_second:,.0f}",
    "x dense time per FLOP": "{time_per_flop_ratio:,.2f}",
    "plan / peak": "{planned_to_peak:,.4f}",
}


def sparse_steps(bench: Bench, quick: bool = False) -> dict:
    """Decode steps beside a dense model of the same active bytes; prefill beside the dense 4B shape's."""
    result = {}
    for name, options in {"int4": INT4, "bf16": {}}.items():
        wide = not options
        dense = dict(hf_overrides=DENSE) if bench.scale == 1 else {}
        model = engine(bench, "qwen3-1.7b", "tiny", 24, [1], **dense, **options)
        result[f"dense, {name}, 1 x 1k"] = one = steps(bench, model, [1])[0]
        batches = [1] if wide else [1, 64]
        llm = engine(bench, "qwen3-30b-a3b", "tiny-sparse", 68 if wide else 34, batches, **options)
        if not quick:
            found = prefill(bench, llm)
        for batch, case in zip(batches, steps(bench, llm, batches), strict=True):
            result[f"qwen3-30b-a3b, {name}, {batch} x 1k"] = case
        case = result[f"qwen3-30b-a3b, {name}, 1 x 1k"]
        case["more_than_dense"] = case["microseconds_per_layer"] - one["microseconds_per_layer"]
        if not quick:
            llm = engine(bench, "qwen3-4b", "tiny", 24, [1], **options)
            beside = prefill(bench, llm)
            bench.release(llm)
            found["time_per_flop_ratio"] = found["seconds_per_flop"] / beside["seconds_per_flop"]
            result |= {f"qwen3-30b-a3b, {name}, prefill of 8k": found, f"qwen3-4b, {name}, prefill of 8k": beside}
    return result


def sparse_families(bench: Bench) -> dict:
    """Decode steps of other sparse shapes in int4, each beside itself without experts: its MLPs have as many columns as
    a token's experts, and the MLP beside them, have together."""
    result = {}
    for shape, dense in WITHOUT_EXPERTS.items() if bench.scale == 1 else [("tiny-sparse", {})]:
        one, case = (
            steps(bench, engine(bench, shape, tiny, 24, [1], **INT4, **overrides), [1])[0]
            for tiny, overrides in (("tiny", dict(hf_overrides=dense) if dense else {}), ("tiny-sparse", {}))
        )
        case["more_than_dense"] = case["microseconds_per_layer"] - one["microseconds_per_layer"]
        result |= {f"{shape} without experts, int4, 1 x 1k": one, f"{shape}, int4, 1 x 1k": case}
    return result


def sparse_gpt_oss(bench: Bench) -> dict:
    """gpt-oss-20b in MXFP4, its head as in its file."""
    return {"gpt-oss-20b, MXFP4, 1 x 1k": steps(bench, engine(bench, "gpt-oss-20b", "tiny-sparse", 24, [1]), [1])[0]}


def sparse_streamed(bench: Bench) -> dict:
    """Qwen3-30B-A3B in int4 within 24 GiB, with a context of 128k tokens that does not fit beside it."""
    context = bench.tokens(131_072)
    shape = "qwen3-30b-a3b" if bench.scale == 1 else "tiny-sparse"
    llm = bench.llm(
        shape,
        max_model_len=context + 64,
        max_num_seqs=1,
        enable_cpu_offload=True,
        capture_num_tokens=[],
        host_memory_limit=bench.host_bytes(shape, context),
        gpu_memory_limit=bench.limit(24),
        **INT4,
    )
    bench.measure(llm, [context], 24)
    num_layers = len(llm.engine.runner.spec.layers)
    (found,) = bench.release(llm)
    found["microseconds_per_layer"] = found["seconds_per_token"] * 1e6 / num_layers
    return {"qwen3-30b-a3b, int4, 24 GiB, 1 x 128k, streamed": found}


def sparse_hf(bench: Bench) -> dict:
    """transformers on the same random weights in bf16, its KV on the GPU, beside this engine; of 12 layers."""
    shape, layers = ("qwen3-30b-a3b", 12) if bench.scale == 1 else ("tiny-sparse", 4)
    overrides, short, long = dict(num_hidden_layers=layers), bench.tokens(CONTEXT), bench.tokens(PREFILL)
    with tempfile.TemporaryDirectory() as directory:
        options = dict(dtype="auto", device=bench.device, load_format="dummy", seed=0, hf_overrides=overrides)
        reference = load_reference(str(write_shape(shape, directory)), **options)
    found = {}
    for name, context, output in (("warm-up", long, 2), ("decode", short, 24), ("prefill", long, 2)):
        found[name] = measure_reference("hf", *reference, [context], output, cache="dynamic")
    del reference
    free_memory()
    llm = engine(bench, shape, "tiny-sparse", 24, [1], hf_overrides=UNLIMITED | overrides)
    ours = {"prefill": prefill(bench, llm)["prefill_tokens_per_second"]}
    ours["decode"] = steps(bench, llm, [1])[0]["seconds_per_token"]
    theirs = dict(
        seconds_per_token=found["decode"].seconds_per_token,
        prefill_tokens_per_second=found["prefill"].prefill_tokens_per_second,
    )
    faster = dict(
        seconds_per_token=ours["decode"],
        prefill_tokens_per_second=ours["prefill"],
        decode_faster=theirs["seconds_per_token"] / ours["decode"],
        prefill_faster=ours["prefill"] / theirs["prefill_tokens_per_second"],
    )
    return {f"qwen3-30b-a3b, bf16, {layers} layers": faster, "transformers, the same": theirs}


def sparse_planner(bench: Bench) -> dict:
    """What is planned beside the peak, of shapes whose depth is cut so that each loads within seconds."""
    result = {}
    for shape, gib, options in (
        ("qwen3-30b-a3b", 16, {}),
        ("qwen3-30b-a3b", 8, INT4),
        ("gpt-oss-20b", 8, {}),
        ("glm-4.5-air", 12, INT4),
        ("mixtral-8x7b", 16, {}),
        ("olmoe-7b", 8, {}),
    ):
        name = f"{shape}, {'int4' if options else 'as in its file'}, 4 layers"
        overrides = UNLIMITED | dict(num_hidden_layers=4)
        if bench.scale > 1:
            shape, overrides = "tiny-sparse", UNLIMITED
        reset_peak(bench)
        llm = bench.llm(
            shape,
            max_model_len=bench.tokens(16_384) + 64,
            max_num_seqs=4,
            gpu_memory_limit=bench.limit(gib),
            hf_overrides=overrides,
            **options,
        )
        measure(llm, [bench.tokens(PREFILL)] * 2, 4)
        result[name] = peak(llm)
        release(llm)
    return result


SPARSE = {
    case.__name__: case
    for case in (sparse_steps, sparse_families, sparse_gpt_oss, sparse_streamed, sparse_hf, sparse_planner)
}


def engine(bench: Bench, shape: str, tiny: str, gib: float, batches: list[int], **options) -> LLM:
    """An engine that captures no more than is measured. tiny: the shape if sizes are scaled."""
    batches = [max(1, batch // bench.scale) for batch in batches]
    return bench.llm(
        shape if bench.scale == 1 else tiny,
        max_model_len=bench.tokens(PREFILL) + 64,
        max_num_seqs=max(batches),
        cuda_graph_batch_sizes=batches,
        capture_num_tokens=[],
        gpu_memory_limit=bench.limit(gib),
        **options,
    )


def steps(bench: Bench, llm: LLM, batches: list[int]) -> list[dict]:
    """Close the engine, and return figures of its decode steps of so many sequences of 1,024 tokens."""
    spec, context = llm.engine.runner.spec, bench.tokens(CONTEXT)
    measure(llm, [context], 4, seed=1)
    for batch in batches:
        batch = max(1, batch // bench.scale)
        bench.measure(llm, [context] * batch, 40 + batch * context // PREFILL)
    found = bench.release(llm)
    for case in found:
        case["microseconds_per_layer"] = case["seconds_per_token"] * 1e6 / len(spec.layers)
    return found


def prefill_seconds(bench: Bench, llm: LLM) -> float:
    """Seconds from a prompt to its first token, the median of three."""
    rows = [measure(llm, [bench.tokens(PREFILL)], 4, seed=seed) for seed in range(4)][1:]
    return statistics.median(row.time_to_first_token for row in rows)


def prefill(bench: Bench, llm: LLM) -> dict:
    tokens, seconds = bench.tokens(PREFILL), prefill_seconds(bench, llm)
    flops = prefill_flops(llm.engine.runner.spec, tokens)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "prefill_tokens_per_second": tokens / seconds,
        "flops": flops,
        "seconds_per_flop": seconds / flops,
    }


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """Operations of the products and of attention, without the head, of a prompt in a model without windows."""
    hidden, q, kv, sparse = spec.hidden_size, spec.attention.q_size, spec.attention.kv_size, spec.sparse
    num_sparse = 0 if sparse is None else sparse.num_layers
    weights = len(spec.layers) * hidden * (2 * q + 2 * kv)
    weights += (len(spec.layers) - num_sparse) * 3 * hidden * spec.intermediate_size
    if sparse is not None:
        columns = sparse.num_chosen * sparse.intermediate_size + sparse.shared_size
        weights += num_sparse * hidden * (3 * columns + sparse.num_experts)
    return 2 * tokens * weights + len(spec.layers) * 2 * q * tokens**2


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    rows = [{"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    empty = dict.fromkeys(
        ("microseconds_per_layer", "more_than_dense", "seconds_per_token", "ratio_to_floor",
         "prefill_tokens_per_second", "time_per_flop_ratio", "planned_to_peak")
    )  # fmt: skip
    return table([empty | row for row in rows], COLUMNS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="steps alone")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--scale", type=int, default=1, help="divide contexts and sizes, to try the code")
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = sparse_steps(Bench(None, options.scale, device), options.quick)
    if options.out is not None:
        options.out.write_text(json.dumps({"versions": versions(device), "cases": found}, indent=1) + "\n")
    print(report(found))
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
