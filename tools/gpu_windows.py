"""Cases of `make gpu-bench` with layers that see a window: the KV blocks that one sequence holds, on both tiers, beside
those that its layers read, and its steps where all is on the GPU and where all streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gpu_common import Bench, peak, reset_peak

from nanoinfer import LLM
from nanoinfer.measure.report import table
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


def windows(bench: Bench, shape: str) -> dict:
    """One sequence in both modes."""
    contexts, overrides = SHAPES[shape] if bench.is_cuda else (CONTEXTS[:1], SMALL)
    result, longest = {}, bench.tokens(max(contexts)) + 128
    for mode, options in MODES.items():
        reset_peak(bench)
        limits = dict(gpu_memory_limit=bench.limit(90), host_memory_limit=bench.limit(16))
        sizes = dict(max_model_len=longest, max_num_seqs=1, cuda_graph_batch_sizes=[1], capture_num_tokens=[])
        llm = bench.llm(shape, hf_overrides=UNLIMITED | overrides, **limits, **sizes, **options)
        held = []
        for context in contexts:
            with _watched(llm, bench.tokens(context)) as blocks:
                bench.measure(llm, [bench.tokens(context)], 24)
            held.append(blocks)
        known = peak(llm)
        for context, blocks, found in zip(contexts, held, bench.release(llm), strict=True):
            result[f"{shape}, {bench.tokens(context):,} tokens, {mode}"] = known | found | blocks
    return result


@contextmanager
def _watched(llm: LLM, num_tokens: int) -> Iterator[dict]:
    """Give the most blocks that a sequence holds in a decode step and before, on both tiers, beside those that its
    layers read: all of groups without a window, and of others ceil(window / block) + 1."""
    result, most, stats, groups = {}, {True: 0, False: 0}, llm.stats, llm.engine.executor.spec.kv_groups
    begun = stats()["num_decode_steps"]

    def watched() -> dict:
        found = stats()
        is_decode = found["num_decode_steps"] > begun + 1
        most[is_decode] = max(most[is_decode], found["gpu_blocks_used"] + found["host_blocks_used"])
        return found

    llm.stats = watched
    yield result
    del llm.stats
    needed = 0
    for group in groups:
        whole = -(-(num_tokens + 24) // group.block_size)
        needed += whole if group.window is None else min(whole, -(-group.window // group.block_size) + 1)
    result |= dict(blocks=most[True], needed=needed)
    result |= dict(held_to_needed=most[True] / needed, held_in_prefill=most[False] / needed)


WINDOWS = {f"windows_{shape}": partial(windows, shape=shape) for shape in SHAPES}


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    empty = dict.fromkeys("seconds_per_token ratio_to_floor held_to_needed held_in_prefill planned_to_peak".split())
    rows = [empty | {"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    return table(rows, COLUMNS.items())
