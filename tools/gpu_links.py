"""Decode steps in 4 bits within small budgets, over the link as it is and over slower ones, which are emulated.

A part of its own of `make gpu-bench`, some three minutes: python tools/gpu_bench.py --part links
"""

from __future__ import annotations

import time
from functools import partial

from gpu_common import Bench, token_bytes
from gpu_sparse import INT4

from nanoinfer import LLM, SamplingParams
from nanoinfer.measure.report import table
from nanoinfer.measure.run import WARM_UP_STEPS, Row, random_prompts
from nanoinfer.memory.streamed import streamed_bytes

# Of emulated links, in bytes per second in each direction: PCIe 4 and PCIe 3 with 16 lanes.
RATES = (25e9, 12.5e9)
CONTEXTS = (8192, 32_768, 131_072)
# In the order of what is looked for first: what comes last is left out if the time is over.
ENGINES = (("qwen3-8b", 8), ("qwen3-4b", 8), ("qwen3-8b", 12), ("qwen3-4b", 12))
NUM_STEPS = 4  # that count, behind those that warm up: one of 131,072 tokens over the slowest link takes a second
MOST_SECONDS = 185  # of the whole part
# A prompt of four times the tokens has so much fewer tokens per second, at the most.
SLOWER_PREFILL = 2.5
COLUMNS = {
    "case": "{case}",
    "link": "{link}",
    "ms a token": "{seconds_per_token!m:,.1f}",
    "tok/s": "{tokens_per_second:,.1f}",
    "bound by": "{bound}",
    "KV on GPU": "{kv_resident_share:.0%}",
    "forecast, ms": "{forecast_seconds!m:,.1f}",
    "measured / forecast": "{ratio_to_forecast:,.3f}",
    "skipped": "{skipped}",
}


def links(bench: Bench, shape: str, gib: int) -> dict:
    """One engine. Each context is computed once, and its decode steps are measured over one link after the other."""
    begin = bench.shared.setdefault("links", {"begin": time.perf_counter()})["begin"]
    names = [f"{shape}, {gib} GiB, {tokens:,} tokens" for tokens in CONTEXTS]
    over = {name: {"case": name, "link": "-", "skipped": f"{MOST_SECONDS} s for all were over"} for name in names}
    if time.perf_counter() - begin > MOST_SECONDS:
        return over
    contexts, shape = [bench.tokens(tokens) for tokens in CONTEXTS], shape if bench.scale == 1 else "tiny"
    limits = dict(gpu_memory_limit=bench.limit(gib), host_memory_limit=bench.host_bytes(shape, contexts[-1]))
    if not bench.is_cuda:  # all would fit
        limits["resident_kv_limit"] = contexts[-1] * token_bytes(shape) // 2
    common = dict(enable_cpu_offload=True, max_model_len=contexts[-1] + 64, max_num_seqs=1, capture_num_tokens=[])
    rates = [rate / bench.scale for rate in RATES if rate / bench.scale < bench.link]
    llm = bench.llm(shape, **common, **limits, **INT4)
    rows, skipped, prefill_rate = [], {}, None
    for name, context in zip(names, contexts, strict=True):
        left = MOST_SECONDS - (time.perf_counter() - begin)
        if seconds_of(llm, context, rates, prefill_rate) > left:
            skipped[name] = over[name]
            continue
        found, prefill_rate = steps(llm, context, rates)
        rows += [(name, row) for row in found]
        for row in found:
            bench.add(row)
    result = {}
    for (name, row), figures in zip(rows, bench.release(llm), strict=True):
        link = link_name(row, figures)
        result[f"{name}, {link}"] = {"case": name, "link": link} | figures
    return result | skipped


def link_name(row: Row, figures: dict) -> str:
    if row.emulated_link_gbps is not None:
        return f"{row.emulated_link_gbps:g} GB/s, emulated"
    return f"{figures['link_floor_gbps']:.1f} GB/s" if row.streamed_bytes_per_step else "nothing streams"


def seconds_of(llm: LLM, context: int, rates: list[float], prefill_rate: float | None) -> float:
    """What a context will take, from the tokens per second of a shorter one's prefill; None: there was none yet."""
    engine = llm.engine
    streamed = streamed_bytes(engine.config, engine.runner.spec, engine.plan, [context])
    decode = sum((WARM_UP_STEPS + NUM_STEPS) * streamed / rate for rate in rates)
    return decode + (SLOWER_PREFILL * context / prefill_rate if prefill_rate else 0)


def steps(llm: LLM, context: int, rates: list[float]) -> tuple[list[Row], float]:
    """Return rows of one sequence over each link, or the first of them if nothing streams; and its prefill's rate."""
    engine = llm.engine
    (prompt,) = random_prompts(engine.vocab_size, [context], seed=0)
    num_tokens = (1 + len(rates)) * (WARM_UP_STEPS + NUM_STEPS + 1)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin, rows = time.perf_counter(), []
    request = engine.add_request("links", prompt, params)
    try:
        while request.first_token is None:
            engine.step()
        prefill_rate = context / (request.first_token - begin)
        for rate in (None, *rates):
            rows.append(row_of(llm, context, rate))
            rows[-1].prefill_tokens_per_second = prefill_rate
            if not rows[-1].streamed_bytes_per_step:
                break
    finally:
        engine.runner.offload.emulate_link(None)
        engine.abort("links")
    return rows, prefill_rate


def row_of(llm: LLM, context: int, rate: float | None) -> Row:
    """Return decode steps of the one sequence that runs, over a link of this rate."""
    engine, times, streamed = llm.engine, [], []
    engine.runner.offload.emulate_link(rate)
    row = Row(mode=llm.mode, batch=1, context=context, emulated_link_gbps=rate and rate / 1e9)
    before, counts, last = engine.meter.snapshot(), llm.stats(), time.perf_counter()
    while len(times) < WARM_UP_STEPS + NUM_STEPS:
        engine.step()
        begin, last = last, time.perf_counter()
        earlier, counts = counts, llm.stats()
        if counts["num_decode_steps"] > earlier["num_decode_steps"]:
            times.append(last - begin)
            streamed.append((counts["decode_streamed_bytes"] - earlier["decode_streamed_bytes"], 0))
    row.take_steps(times)
    row.take_bytes(engine, streamed, [context])
    row.bound = engine.meter.times.since(before).bound
    row.kv_resident_share, row.peak_gpu_bytes = engine.meter.resident_share, engine.runner.peak_bytes()
    return row


LINKS = {f"links_{shape}_{gib}gib": partial(links, shape=shape, gib=gib) for shape, gib in ENGINES}


def report(cases: dict) -> str:
    """The rows as a table."""
    rows = [case for case in cases.values() if isinstance(case, dict)]
    empty = dict.fromkeys(
        ("seconds_per_token", "tokens_per_second", "bound", "kv_resident_share", "forecast_seconds",
         "ratio_to_forecast", "skipped")
    )  # fmt: skip
    return table([empty | row for row in rows], COLUMNS.items())
