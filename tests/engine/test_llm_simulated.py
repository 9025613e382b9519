"""The whole engine on the simulated runtime, with requests that come, go, share prefixes and are preempted.

`test_engine_simulated.py` has the plain cases. Here blocks are freed, shared and used again at the worst moments.
"""

import functools
from dataclasses import replace

import pytest
from engines import (
    BLOCK_BYTES,
    MOVE_RULES,
    RULES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    random_prompts,
    some_params,
)
from request_helpers import Script, play
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

NUM_SEEDS = 20
TIGHT = dict(max_num_seqs=3, max_num_batched_tokens=48, max_model_len=128, num_ring_slots=2, ring_slot_bytes=2048)
PAIRS = list(zip(random_prompts(6, 30, 90, seed=3), some_params(6, max_tokens=14)[::-1], strict=True))
PREFIX = random_prompts(1, 50, 50, seed=5)[0]
SHARED = [(PREFIX + tail, params) for tail, (_, params) in zip(random_prompts(5, 1, 30, seed=6), PAIRS, strict=False)]

# Name: family, its fields, arguments of the engine, what happens.
CASES = {
    "requests come and are aborted": (
        "qwen3",
        {},
        dict(enable_cpu_offload=True, enable_prefix_caching=False, host_memory_limit=8 * BLOCK_BYTES),
        # Request 1 is aborted in its prefill, 0 and 3 while they decode, when their blocks are prefetched already.
        Script({0: PAIRS[:2], 3: PAIRS[2:4], 9: PAIRS[4:]}, aborts={2: 1, 7: 0, 15: 3}, num_gpu_blocks=5),
    ),
    "two kinds of layers": (
        "gemma3",
        dict(sliding_window=24),
        dict(
            enable_cpu_offload=True,
            enable_prefix_caching=False,
            num_ring_slots=3,
            ring_slot_bytes=2 * 2048,
            host_memory_limit=8 * BLOCK_BYTES,
        ),
        Script({0: PAIRS[:3], 6: PAIRS[3:]}, aborts={5: 2}, num_gpu_blocks=6),
    ),
    "preempted and switched": (
        "qwen3",
        {},
        dict(enable_prefix_caching=False, max_num_seqs=4),
        Script(
            {0: PAIRS[:4], 12: PAIRS[4:]},
            aborts={11: 1},
            modes={10: "offload", 20: "resident", 24: "offload"},
            num_gpu_blocks=15,
        ),
    ),
    "a shared prefix": (
        "qwen3",
        {},
        dict(enable_cpu_offload=True, ring_slot_bytes=2 * 2048),
        Script({0: SHARED[:1], 4: SHARED[1:4], 10: SHARED[4:]}, aborts={6: 1}, modes={13: "resident", 16: "offload"}),
    ),
    "prompts and running sequences in one step": (
        "gemma3",
        dict(sliding_window=24),
        dict(
            enable_cpu_offload=True,
            enable_prefix_caching=False,
            host_memory_limit=8 * BLOCK_BYTES,
            capture_num_tokens=[8, 32, 48],
        ),
        Script({0: PAIRS[:2], 4: PAIRS[2:4], 9: PAIRS[4:]}, aborts={7: 0}, num_gpu_blocks=7),
    ),
    "one step for prompts and others, preempted and switched": (
        "qwen3",
        {},
        dict(enable_prefix_caching=False, max_num_seqs=4, capture_num_tokens=[16, 48]),
        Script(
            {0: PAIRS[:4], 12: PAIRS[4:]},
            modes={10: "offload", 18: "resident", 22: "offload"},
            num_gpu_blocks=13,
        ),
    ),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    @functools.cache
    def make(case):
        family, fields, _, _ = CASES[case]
        return make_checkpoint(family, tmp_path_factory.mktemp("model"), **(SMALL | fields))

    return make


def play_case(path_of, case, seed):
    _, _, arguments, script = CASES[case]
    engine = make_engine(path_of(case), SimulatedRuntime(seed), **(TIGHT | arguments))
    played = play(engine, script)
    assert_pools_as_before(engine)
    return played, engine


@pytest.mark.parametrize("case", CASES)
def test_every_legal_order_gives_the_same_batches_and_the_same_bits(path_of, case, fuzz):
    """Who comes back after it gave way is in a batch when its blocks are there: batches may differ then, not bits."""
    wanted, engine = play_case(path_of, case, None)
    assert sorted(engine.runner.runtime.rules_seen - MOVE_RULES) == RULES
    assert (engine.scheduler.num_preemptions > 0) == ("preempted and switched" in case)
    assert engine.stats()["streamed_bytes"] > 0
    assert (engine.stats()["num_mixed_steps"] > 2) == ("one step" in case)
    assert (engine.stats()["host_blocks_cached"] > 0) == (case == "a shared prefix")
    for seed in range(NUM_SEEDS if fuzz else 1):
        found, _ = play_case(path_of, case, seed)
        if "preempted" in case:
            found = replace(found, batches=wanted.batches)
        assert found == wanted, f"seed {seed}"


def test_chunks_do_not_depend_on_how_fast_the_copies_are(path_of, fuzz):
    """A pool below one chunk and its write-through: what a chunk can have depends on blocks that are still copied."""
    script = Script({0: list(zip(random_prompts(3, 100, 110), some_params(3, max_tokens=6)))}, num_gpu_blocks=4)
    arguments = dict(enable_cpu_offload=True, enable_prefix_caching=False, max_num_batched_tokens=64)
    path = path_of("requests come and are aborted")

    def batches(seed):
        return play(make_engine(path, SimulatedRuntime(seed), **(TIGHT | arguments)), script).batches

    wanted = batches(None)
    assert [(0, 64)] in wanted, "no chunk takes the whole pool"
    for seed in range(10 if fuzz else 1):
        assert batches(seed) == wanted, f"seed {seed}"
