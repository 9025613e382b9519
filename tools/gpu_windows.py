"""Cases of `make gpu-bench` with layers that see a window: the KV blocks that one sequence holds, on both tiers, beside
those that its layers read, and its steps where all is on the GPU and where all streams."""

from __future__ import annotations

from gpu_common import Bench, peak, reset_peak

from nanoinfer import LLM, SamplingParams
from nanoinfer.measure.report import table
from nanoinfer.measure.run import random_prompts
from nanoinfer.models.shapes import UNLIMITED

CONTEXTS = (32_768, 131_072)
SHAPES = {
    "gemma3-12b": (CONTEXTS, {}),
    # Their attention is what is looked at: with fewer experts they start sooner.
    "gpt-oss-20b": (CONTEXTS[1:], dict(num_local_experts=4)),
    "gpt-oss-120b": (CONTEXTS[1:], dict(num_local_experts=4)),
}
SMALL = dict(num_hidden_layers=7, hidden_size=64, intermediate_size=64, vocab_size=256, sliding_window=128)
MODES = {
    "resident": {},
    "streamed": dict(enable_cpu_offload=True, resident_kv_limit=0),
}
COLUMNS = {
    "case": "{case}",
    "ms a step": "{seconds_per_token!m:,.3f}",
    "x floor": "{ratio_to_floor:,.3f}",
    "x needed, decode": "{held_to_needed:,.3f}",
    "x needed, prefill": "{held_in_prefill:,.3f}",
    "plan / peak": "{planned_to_peak:,.4f}",
}


def windows(bench: Bench) -> dict:
    """One sequence of the shapes of Gemma 3 and gpt-oss."""
    result = {}
    for shape, (contexts, overrides) in SHAPES.items() if bench.is_cuda else [("gemma3-1b", (CONTEXTS[:1], SMALL))]:
        for mode, options in MODES.items():
            longest = bench.tokens(max(contexts)) + 128
            host = bench.host_bytes(shape, longest)
            reset_peak(bench)
            limits = dict(gpu_memory_limit=bench.limit(90), host_memory_limit=host + bench.limit(8))
            sizes = dict(max_model_len=longest, max_num_seqs=1, cuda_graph_batch_sizes=[1], capture_num_tokens=[])
            llm = bench.llm(shape, hf_overrides=UNLIMITED | overrides, **limits, **sizes, **options)
            held = [_held(llm, bench.tokens(context)) for context in contexts]
            for context in contexts:
                bench.measure(llm, [bench.tokens(context)], 24)
            known = peak(llm)
            for context, blocks, found in zip(contexts, held, bench.release(llm), strict=True):
                result[f"{shape}, {bench.tokens(context):,} tokens, {mode}"] = known | found | blocks
    return result


def _held(llm: LLM, num_tokens: int) -> dict:
    """The most blocks that a sequence holds in a decode step and before, beside those that its layers read: all of
    groups without a window, and of others ceil(window / block) + 1."""
    engine = llm.engine
    groups = engine.executor.spec.kv_groups
    (prompt,) = random_prompts(engine.vocab_size, [num_tokens], 1)
    request = engine.add_request("held", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    most = {True: 0, False: 0}
    while not request.is_finished:
        engine.step()
        stats = llm.stats()
        is_decode = len(request.sequences[0].token_ids) > num_tokens + 2
        most[is_decode] = max(most[is_decode], stats["gpu_blocks_used"] + stats["host_blocks_used"])
    needed = sum(
        -(-(num_tokens + 12) // group.block_size)
        if group.window is None
        else min(-(-group.window // group.block_size) + 1, -(-(num_tokens + 12) // group.block_size))
        for group in groups
    )
    return dict(
        blocks=most[True], needed=needed, held_to_needed=most[True] / needed, held_in_prefill=most[False] / needed
    )


WINDOWS = {"windows": windows}


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    empty = dict.fromkeys("seconds_per_token ratio_to_floor held_to_needed held_in_prefill planned_to_peak".split())
    rows = [empty | {"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    return table(rows, COLUMNS.items())
