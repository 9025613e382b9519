"""Cases of `make gpu-bench` with what a user waits for: a server that was started without options, whose experts come
one by one, the next turn of a long chat with layers that keep states, a step by its drafted tokens, and others' tokens
while states are kept."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpu_agents import CASES as AGENTS
from gpu_common import Bench

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.measure.report import table
from nanoinfer.measure.run import random_prompts, release
from nanoinfer.memory.floors import bytes_read_per_step, measure_floors, sparse_layers_seconds
from nanoinfer.memory.setup import Specs
from nanoinfer.memory.streamed import missed_bytes
from nanoinfer.models.shapes import SHAPES, write_shape
from nanoinfer.weights.load import read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 150
PROMPT, ANSWER = 3840, 257
HISTORY, TURN = 24_800, 400
DRAFTED, DRAFTED_PROMPT, DRAFTED_ANSWER = (1, 2, 4, 8), 1024, 433
SERVED = (
    ("gpt-oss-20b", "11GiB", {}), ("qwen3-30b-a3b", "8GiB", dict(quantization="int4")),
    ("qwen3-30b-a3b", "11GiB", dict(quantization="int4")), ("gpt-oss-120b", "22GiB", {}),
)  # fmt: skip
COLUMNS = {
    "case": "{case}",
    "slots": "{num_expert_slots}",
    "hits": "{expert_hit_rate:.0%}",
    "ms a token": "{seconds_per_token!m:,.2f}",
    "forecast": "{forecast_seconds!m:,.2f}",
    "as if all were chosen alike": "{worst_seconds!m:,.2f}",
    "x forecast": "{ratio_to_forecast:.3f}",
    "turn, ms": "{turn_seconds!m:,.1f}",
    "cold, ms": "{cold_seconds!m:,.1f}",
    "snapshot, ms": "{snapshot_seconds!m:,.2f}",
    "cached": "{num_cached_tokens:,}",
    "steps": "{num_steps}",
    "x cold": "{ratio_to_cold:.3f}",
    "step, ms": "{step_seconds!m:,.3f}",
    "x without": "{ratio_to_none:.3f}",
    "tokens": "{tokens_per_step:.2f}",
    "ms more a draft": "{seconds_per_draft!m:,.3f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "first token, ms": "{first_token_seconds!m:,.1f}",
    "x found": "{ratio_to_found:.3f}",
    "longest gap, ms": "{gap_seconds!m:,.2f}",
    "more than else": "{seconds_more!m:+,.2f}",
}


def served(bench: Bench) -> dict:
    """One client's gaps between tokens, from `nanoinfer serve` with a memory limit alone, beside the forecast at the
    share of experts that was found in slots."""
    result = {}
    for shape, limit, options in SERVED if bench.is_cuda else [("tiny-sparse", "1GiB", dict(expert_slots=8))]:
        with tempfile.TemporaryDirectory() as directory:
            write_shape(shape, directory)
            result[f"{shape}, {limit}"] = _served(bench, directory, limit, options, SHAPES[shape]["vocab_size"])
    return result


def turns(bench: Bench) -> dict:
    """The second turn of a chat of 25k tokens: to its first token, beside a cold prompt of what was not found and a
    snapshot's way over the link. Medians of three, behind two that have memory pinned."""
    result, link = {}, measure_floors(bench.device).link
    shapes = ("lfm2-24b-a2b", "qwen3.5-9b", "qwen3.6-27b") if bench.is_cuda else (bench.small,)
    for shape in shapes:
        history, limits = bench.tokens(HISTORY), dict(gpu_memory_limit=bench.limit(60))
        options = (
            {} if not bench.is_cuda or shape == "qwen3.5-9b" else dict(quantization="int4", head_quantization="int8")
        )
        limits |= dict(host_memory_limit="24GiB") if bench.is_cuda else {}
        # A state behind an end that a step passes lies in a slot that no sequence has.
        sizes = dict(
            max_model_len=history + 2000, max_num_seqs=2, cuda_graph_batch_sizes=[1], enable_prefix_caching=True
        )
        llm = bench.llm(shape, **sizes, **limits, **options)
        rows = [_turn(llm, history, seed) for seed in range(5)][2:]
        found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        found["snapshot_seconds"] = llm.engine.executor.spec.state_bytes / link
        found["ratio_to_cold"] = found["turn_seconds"] / (found["cold_seconds"] + found["snapshot_seconds"])
        result[f"{shape}, {history:,} tokens"] = found
        release(llm)
    return result


def drafted(bench: Bench) -> dict:
    """A step of one sequence by the tokens that are drafted in it, all of them right, beside one without: layers with
    states compute a sequence's tokens one by one, others at once. Medians of three."""
    result = {}
    int4 = dict(quantization="int4", head_quantization="int8")
    shapes = {"qwen3-8b": {}, "qwen3.5-9b": {}, "qwen3.6-27b": int4, "qwen3.6-35b-a3b": int4}
    for shape, options in shapes.items() if bench.is_cuda else [(bench.small, {})]:
        drafts = dict(method="suffix", num_speculative_tokens=max(DRAFTED))
        sizes = dict(max_model_len=bench.tokens(DRAFTED_PROMPT) + 600, max_num_seqs=1, capture_num_tokens=[])
        llm = bench.llm(shape, gpu_memory_limit=bench.limit(60), speculative_config=drafts, **sizes, **options)
        (prompt,) = random_prompts(llm.engine.vocab_size, [bench.tokens(DRAFTED_PROMPT)], 0)
        text, plain = prompt, 0.0
        for count in (0, *DRAFTED):
            _drafted_step(llm, prompt, text, count)  # compiles
            runs = [_drafted_step(llm, prompt, text, count) for _ in range(3)]
            steps, tokens, texts = zip(*runs, strict=True)
            step = statistics.median(steps)
            if not count:
                text, plain = texts[0], step
            found = dict(step_seconds=step, ratio_to_none=step / plain, is_same_text=all(text == one for one in texts))
            found |= dict(tokens_per_step=statistics.median(tokens))  # fewer where drafts rested: they did not pay
            found |= dict(seconds_per_draft=(step - plain) / count) if count else {}
            result[f"{shape}, {count} drafted"] = found
        release(llm)
    return result


def state_gaps(bench: Bench) -> dict:
    """The longest time between two tokens of a sequence while states of another one's prompt are kept, 151 MB each,
    beside the same where none is: a copy that somebody waits for would show. Least of three. A state is kept where a
    step ends, so steps are as short in both."""
    shape = "qwen3.6-27b" if bench.is_cuda else bench.small
    options = dict(quantization="int4", head_quantization="int8") if bench.is_cuda else {}
    history, result = bench.tokens(HISTORY), {}
    for name, is_kept in (("kept", True), ("not kept", False)):
        sizes = dict(max_model_len=history + 600, max_num_seqs=4, enable_prefix_caching=is_kept)
        sizes |= dict(max_num_batched_tokens=bench.tokens(2048) // 64 * 64)
        llm = bench.llm(shape, gpu_memory_limit=bench.limit(60), **sizes, **options)
        with _frozen():
            gaps = [_longest_gap(llm, history, seed) for seed in range(5)][2:]
        found = dict(gap_seconds=min(gaps), num_snapshots=llm.stats()["num_snapshots"])
        result[f"{shape}, {history:,} tokens beside, states {name}"] = found
        release(llm)
    kept, plain = result.values()
    kept["seconds_more"] = kept["gap_seconds"] - plain["gap_seconds"]
    return result


def giving_way(bench: Bench) -> dict:
    """The longest time between two tokens of a sequence while one of 32k tokens gives way to it and comes back, beside
    a step of both. The first run has memory pinned."""
    length, block_size, shape = bench.tokens(32_768), 256, bench.large
    sizes = dict(max_num_seqs=3, enable_prefix_caching=False, capture_num_tokens=[], block_size=block_size)
    # As many as the prompts of all three take, and one of each row for what comes: less than they will take.
    num_blocks = sum(-(-tokens // block_size) + 1 for tokens in (length, 4 * block_size, 2 * block_size)) + 1
    sizes |= dict(num_gpu_blocks_override=num_blocks, max_model_len=max(length, 8 * block_size) + 4 * block_size)
    llm = bench.llm(shape, gpu_memory_limit=bench.limit(60), host_memory_limit=bench.limit(8), **sizes)
    with _frozen():
        runs = [_gap_of_giving_way(llm, length, block_size, seed) for seed in range(3)]
    result = {f"{shape}, {length:,} tokens, run {number}": run for number, run in enumerate(runs)}
    release(llm)
    return result


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Have the collector of garbage leave out what is there, as the server does: a step may wait 20 ms for it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _gap_of_giving_way(llm: nanoinfer.LLM, length: int, block_size: int, seed: int) -> dict:
    engine, before = llm.engine, llm.stats()["num_preemptions"]
    prompts = random_prompts(engine.vocab_size, [4 * block_size, 2 * block_size, length], seed)
    fields = dict(temperature=0, ignore_eos=True)
    for name, prompt, count in zip("ABC", prompts, (6 * block_size, 2 * block_size, 3 * block_size), strict=True):
        engine.add_request(f"{name}{seed}", prompt, SamplingParams(max_tokens=count, **fields))
    times, is_beside, plain = [], [], []
    while engine.has_work:
        names = [output.request_id[0] for output in engine.step()]
        now = time.perf_counter()
        if "A" in names:
            if times and "C" in names:
                plain.append(now - times[-1])
            times.append(now)
            is_beside.append("C" in names)
    gaps = [after - start for start, after in zip(times, times[1:], strict=False)]
    changes = [number for number, (one, two) in enumerate(zip(is_beside, is_beside[1:], strict=False)) if one != two]
    # The copies begin some steps before a row is seen to be gone, and end some behind.
    near = [gap for number in changes[1:] for gap in gaps[max(0, number - 40) : number + 40]]
    step = statistics.median(plain)
    return dict(
        gap_seconds=max(near),
        step_seconds=step,
        seconds_more=max(near) - step,
        num_preemptions=llm.stats()["num_preemptions"] - before,
    )


CASES = {case.__name__: case for case in (served, turns, drafted, state_gaps, giving_way)} | AGENTS


def _longest_gap(llm: nanoinfer.LLM, history: int, seed: int) -> float:
    """Return the longest time between tokens of a sequence, from when another one's prompt comes until it is computed
    and some tokens behind that."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    short, long = random_prompts(engine.vocab_size, [64, history], seed)
    engine.add_request("first", short, params)
    times, num_behind, is_there = [], 0, False
    while num_behind < 30:
        if len(times) == 30 and not is_there:
            engine.add_request("other", long, replace(params, max_tokens=40))
            is_there = True
        names = [output.request_id for output in engine.step()]
        times += [time.perf_counter()] * ("first" in names)
        num_behind += "other" in names
    while engine.has_work:
        engine.step()
    return max(after - before for before, after in zip(times[29:], times[30:], strict=False))


def _drafted_step(llm: nanoinfer.LLM, prompt: list[int], text: list[int], count: int) -> tuple[float, float, list[int]]:
    """Return a step's seconds and tokens, and prompt and answer, where drafts are what `text` goes on with."""

    def propose(_: int, token_ids: list[int], most: int) -> list[int]:
        return text[len(token_ids) :][: min(most, count)]

    llm.engine.drafts.drafter.propose = propose
    params = SamplingParams(temperature=0, max_tokens=DRAFTED_ANSWER, ignore_eos=True)
    before = llm.stats()["num_decode_steps"]
    (output,) = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)
    num_steps = llm.stats()["num_decode_steps"] - before
    seconds = output.metrics.time_per_output_token * (DRAFTED_ANSWER - 1)
    answer = output.outputs[0].token_ids
    return seconds / num_steps, (DRAFTED_ANSWER - 1) / num_steps, [*prompt, *answer]


def _turn(llm: nanoinfer.LLM, history: int, seed: int) -> dict:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first, new, other = random_prompts(llm.engine.vocab_size, [history, TURN, history], seed)

    def ask(prompt: list[int]) -> tuple[object, int]:
        before = llm.stats()["num_prefill_steps"]
        (output,) = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)
        return output, llm.stats()["num_prefill_steps"] - before

    answer, _ = ask(first)
    second = [*first, *answer.outputs[0].token_ids, *new]
    turn, num_steps = ask(second)
    cached = turn.metrics.num_cached_tokens
    cold, _ = ask(other[: len(second) - cached])
    return dict(
        turn_seconds=turn.metrics.time_to_first_token, cold_seconds=cold.metrics.time_to_first_token,
        num_cached_tokens=cached, num_steps=num_steps,
    )  # fmt: skip


def _served(bench: Bench, directory: str, limit: str, options: dict, vocab_size: int) -> dict:
    floors = measure_floors(bench.device)
    prompt, answer = bench.tokens(PROMPT), ANSWER if bench.is_cuda else 20
    with _server(bench, directory, limit, options) as port:
        _gaps(port, prompt, 24, vocab_size, 0)
        before = _figures(port)
        gaps = statistics.fmean(gap for seed in (1, 2) for gap in _gaps(port, prompt, answer, vocab_size, seed))
        after = _figures(port)
    hits, fetches = (after[name] - before[name] for name in ("expert_hits", "expert_fetches"))
    plan = nanoinfer.plan(directory, gpu_memory_limit=limit, load_format="dummy", **options).memory
    config = nanoinfer.EngineConfig(model=directory, load_format="dummy", **options)
    spec = Specs(read_checkpoint(directory)).of(config)
    computed = bytes_read_per_step(spec, [prompt + answer // 2]) / floors.device + sparse_layers_seconds(spec)
    found = dict(num_expert_slots=after["num_expert_slots"], expert_hit_rate=hits / max(1, hits + fetches))
    forecast = computed + missed_bytes(spec, plan, 1, found["expert_hit_rate"]) / floors.link
    found |= dict(seconds_per_token=gaps, forecast_seconds=forecast, ratio_to_forecast=gaps / forecast)
    return found | dict(worst_seconds=computed + missed_bytes(spec, plan, 1) / floors.link)


@contextlib.contextmanager
def _server(bench: Bench, directory: str, limit: str, options: dict) -> Iterator[int]:
    """Start a server, yield its port, and end it."""
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    given += ["--gpu-memory-limit", limit] + (
        [] if bench.is_cuda else ["--device", "cpu", "--host-memory-limit", "1GiB"]
    )
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoinfer.commands.main", "serve", directory, "--load-format", "dummy", "--port", "0",
         "--skip-tokenizer-init", "--served-model-name", "model", *given],
        stderr=subprocess.PIPE, text=True, env=os.environ | dict(PYTHONPATH=os.pathsep.join(paths)),
    )  # fmt: skip
    try:
        lines, end = [], time.monotonic() + START_SECONDS
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving on http://[^:]*:(\d+)", line):
                break
            if time.monotonic() > end:
                raise TimeoutError("the server takes long to start")
        else:
            raise OSError("the server did not start:\n" + "".join(lines[-12:]))
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)  # what it still writes would fill the pipe
        process.kill()


def _figures(port: int) -> dict:
    time.sleep(1.2)  # they are published now and then
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/engine")
    (replica,) = json.loads(connection.getresponse().read())["replicas"]
    return replica["facts"] | replica["figures"]


def _gaps(port: int, prompt: int, answer: int, vocab_size: int, seed: int) -> list[float]:
    """Return the seconds between the tokens of one answer, drawn at random, of a prompt of random tokens."""
    generator = random.Random(seed)
    body = dict(model="model", prompt=[generator.randrange(10, vocab_size - 10) for _ in range(prompt)], stream=True)
    body |= dict(max_tokens=answer, ignore_eos=True, temperature=1.0, seed=seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    times = [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def report(cases: dict) -> str:
    """Return the rows of one or more cases as a table."""
    rows = [{"case": name} | case for name, case in cases.items() if isinstance(case, dict)]
    names = {title: re.findall(r"\{(\w+)", text) for title, text in COLUMNS.items()}
    shown = {
        title: text for title, text in COLUMNS.items() if any(name in row for row in rows for name in names[title])
    }
    empty = dict.fromkeys(name for title in shown for name in names[title])
    return table([empty | row for row in rows], shown.items()) if shown else ""
