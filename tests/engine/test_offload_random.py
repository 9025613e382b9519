"""Anything at any time: random settings, shared beginnings, arrivals, aborts and switches, in a random order of
streams.

On checksums: each request gets the tokens and log-probabilities that the oracle knows, and both pools are as before.
"""

import random

import checksum
import pytest
from checksum.answers import check
from checksum.oracle import Oracle
from engines import (
    BLOCK_BYTES,
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
)
from guessing import guess
from request_helpers import play_at_random
from simulated import SimulatedRuntime

from nanoinfer import LLMEngine, SamplingParams

BLOCK_SIZE = 16
MODELS = {"dense": ("qwen3", {}), "two kinds": ("qwen3", dict(sliding_window=24)), "experts": ("qwen3_moe", {})}


@pytest.fixture(autouse=True)
def checksums(monkeypatch):
    checksum.use(monkeypatch)


def draw_beginnings(generator: random.Random, seed: int) -> list[list[int]]:
    """The nodes of a tree of beginnings, which branches at block edges and inside of blocks; the root is empty."""
    beginnings: list[list[int]] = [[]]
    for i in range(generator.randint(2, 7)):
        length = generator.choice([16, 16, 32, 48, 5, 27])
        beginnings.append(generator.choice(beginnings) + random_prompts(1, length, length, seed=seed * 11 + i)[0])
    return beginnings


def draw_requests(generator: random.Random, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, some with penalties, log-probabilities or two completions, most with a beginning of
    others."""
    beginnings = draw_beginnings(generator, seed)
    requests = []
    for i in range(generator.randint(2, 7)):
        end = random_prompts(1, 1, generator.choice([3, 40, 90]), seed=seed * 7 + i)[0]
        prompt = (generator.choice(beginnings) + end)[:190]
        params = SamplingParams(
            temperature=generator.choice([0, 0.9]),
            repetition_penalty=generator.choice([1.0, 1.0, 1.2]),
            presence_penalty=generator.choice([0.0, 0.0, 0.7]),
            frequency_penalty=generator.choice([0.0, 0.0, 0.5, -0.5]),
            seed=i,
            max_tokens=generator.randint(1, 60),
            ignore_eos=True,
            n=generator.choice([1, 1, 1, 2]),
            logprobs=generator.choice([0, 0, 0, 1]),
        )
        requests.append((prompt, params))
    return requests


def draw_engine(generator: random.Random, path, seed: int) -> LLMEngine:
    """Pools, ring, budget and rows of any size that is allowed."""
    mode, chunk, rows = generator.choice(["auto", "auto", True, False]), generator.choice([16, 32, 64]), 1 + seed % 5
    fewest = max(13, chunk // BLOCK_SIZE + 4 + rows) if mode else 24
    return make_engine(
        path,
        SimulatedRuntime(generator.choice([None, seed, seed])),
        enable_cpu_offload=mode,
        max_num_seqs=rows,
        max_model_len=256,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=generator.random() < 0.8,
        capture_num_tokens=generator.choice([[], [8, 16]]),  # with mixed steps or without
        num_gpu_blocks_override=generator.randint(fewest, 40),
        host_memory_limit=generator.choice([16, 20, 40, 80, 200]) * BLOCK_BYTES,
        ring_slot_bytes=generator.choice([1, 2, 3]) * LAYER_BLOCK_BYTES,
        num_ring_slots=generator.choice([2, 3, 4]),
        resident_kv_limit=generator.choice([None, None, 0, 3 * BLOCK_BYTES, 9 * BLOCK_BYTES]),
        speculative_config=generator.choice([None, "auto", dict(method="suffix", num_speculative_tokens=seed % 9 + 1)]),
    )


NUM_GROUPS = 6


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_every_request_gets_what_it_gets_alone(path_of, group, fuzz):
    num_streaming = 0
    for seed in range(group, 1000 if fuzz else 18, NUM_GROUPS):
        generator = random.Random(seed)
        family, fields = MODELS[generator.choice(list(MODELS))]
        path = path_of(family, **SMALL, **fields)
        requests, oracle = draw_requests(generator, seed), Oracle(path)
        engine = draw_engine(generator, path, seed)
        if engine.drafts:
            guess(engine, make_engine(path, max_model_len=256, max_num_seqs=2), requests, random.Random(seed))
        added, aborted = play_at_random(engine, requests, generator, comes=0.3, is_aborted=0.02, is_switched=0.03)
        for number, (request, pair) in enumerate(zip(added, requests, strict=True)):
            found = outcome(request)
            check(oracle, *pair, found)
            assert number in aborted or {reason for _, _, reason in found} == {"length"}, f"seed {seed}"
        num_streaming += engine.stats()["streamed_bytes"] > 0
        assert_pools_as_before(engine)
    assert num_streaming, "nothing streamed in any of them"
