"""Cases of `make gpu-bench --part waits` with agents that call tools, so that nothing can be computed ahead."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from gpu_common import Bench

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.measure.run import random_prompts, release

NUM_AGENTS, NUM_TURNS = 16, 6
PROMPT, RESULT, ANSWER = 2000, 400, 150
RUNS = ((1, True), (2, False), (3, True), (4, False))  # seeds, so that each run's prompts are new, and what is found


def agents(bench: Bench) -> dict:
    """Sixteen agents that leave no idle moment: their answers are computed once more as parts of their next prompts, as
    only what prefill has computed is found. Beside them the same whose answers are computed ahead, off the clock, so
    that they are found. All turns but the first, in which both do the same; the better of two, in turn."""
    return _agents(bench, bench.large, NUM_TURNS, gpu_memory_limit=bench.limit(60))


def agents_slots(bench: Bench) -> dict:
    """The same with experts in slots, where a step takes some 0.1 s: one turn behind the first."""
    limits = dict(gpu_memory_limit=bench.limit(11), host_memory_limit=bench.limit(24))
    return _agents(bench, "gpt-oss-20b" if bench.is_cuda else bench.small, 2, **limits)


def agents_streamed(bench: Bench) -> dict:
    """The same with KV that is streamed, where a step takes some 0.1 s: one turn behind the first."""
    limits = dict(gpu_memory_limit=bench.limit(60), host_memory_limit=bench.limit(24))
    return _agents(bench, bench.large, 2, enable_cpu_offload=True, resident_kv_limit=0, **limits)


def _agents(bench: Bench, shape: str, num_turns: int, **limits) -> dict:
    longest = bench.tokens(PROMPT) + num_turns * (bench.tokens(RESULT) + bench.tokens(ANSWER))
    sizes = dict(max_model_len=longest + 64, max_num_seqs=NUM_AGENTS, enable_prefix_caching=True)
    llm = bench.llm(shape, **sizes, **limits)
    _loops(llm, bench, 0, False, num_turns)  # compiles, and has memory pinned
    runs = [(is_found, _loops(llm, bench, seed, is_found, num_turns)) for seed, is_found in RUNS]
    found, computed = (
        max((run for is_found, run in runs if is_found == wanted), key=lambda run: run["tokens_per_second"])
        for wanted in (True, False)
    )
    computed["ratio_to_found"] = computed["tokens_per_second"] / found["tokens_per_second"]
    release(llm)
    return {f"{shape}, answers found": found, f"{shape}, answers computed": computed}


def _loops(llm: nanoinfer.LLM, bench: Bench, seed: int, is_found: bool, num_turns: int) -> dict:
    """Play all agents, whose turns end together. is_found: whether a next turn finds the last answer."""
    params = SamplingParams(temperature=1.0, max_tokens=bench.tokens(ANSWER), ignore_eos=True)
    texts = random_prompts(llm.engine.vocab_size, [bench.tokens(PROMPT)] * NUM_AGENTS, seed)
    seconds, num_tokens, first, cached = 0.0, 0, [], 0
    for turn in range(num_turns):
        prompts = [dict(prompt_token_ids=text) for text in texts]
        each = [replace(params, seed=100 * seed + agent) for agent in range(NUM_AGENTS)]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, each, use_tqdm=False)
        if turn:
            seconds += time.perf_counter() - begin
            num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            first += [output.metrics.time_to_first_token for output in outputs]
            cached += sum(output.metrics.num_cached_tokens for output in outputs)
        texts = [[*text, *output.outputs[0].token_ids] for text, output in zip(texts, outputs, strict=True)]
        if is_found and turn + 1 < num_turns:
            ahead = [dict(prompt_token_ids=text) for text in texts]
            llm.generate(ahead, replace(params, max_tokens=1), use_tqdm=False)
        results = random_prompts(llm.engine.vocab_size, [bench.tokens(RESULT)] * NUM_AGENTS, 1000 * seed + turn)
        texts = [[*text, *result] for text, result in zip(texts, results, strict=True)]
    found = dict(tokens_per_second=num_tokens / seconds, first_token_seconds=statistics.median(first))
    return found | dict(num_cached_tokens=cached)


CASES = {case.__name__: case for case in (agents, agents_slots, agents_streamed)}
