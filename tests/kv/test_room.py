"""Whoever runs finds the room that it was let in for, and everybody comes to an end.

Steps compute nothing here. So workloads are drawn by the dozen, of pools, rows, windows and states of any size, with
aborts and switches.
"""

import random

import pytest
from engines import SMALL, assert_pools_as_before, make_engine
from hollow import hollow
from kv_models import MODELS, registered, write_model
from request_helpers import play_at_random, tree_of_prompts
from tiny_models import make_checkpoint

from nanoinfer import LLMEngine, SamplingParams

FAMILIES = {"qwen3": {}, "gemma3": dict(num_layers=4, sliding_window=40), "lfm2": {}}
MODES = [False, "auto", True, True]
NUM_GROUPS = 6
SEEDS = [*range(8), 24, 490, 556, 2016]
"""The last ones show what others do rarely: two rows that share what a window sees, where hardly anything is left."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Of windows some have other blocks than the layers without; of states a chunk takes several blocks at a time."""
    with registered():
        paths = {
            name: write_model(tmp_path_factory.mktemp("shapes"), name) for name in ("wide windows", "narrow windows")
        }
        for name, fields in FAMILIES.items():
            paths[name] = make_checkpoint(name, tmp_path_factory.mktemp(name), **SMALL | fields)
        yield paths


def draw_engine(generator: random.Random, paths) -> LLMEngine:
    name = generator.choice(list(paths))
    own = dict(load_format="dummy", block_size=MODELS[name].block_size) if name in MODELS else {}
    if name == "lfm2":
        own = dict(enable_prefix_caching=None, state_slots=12, max_num_seqs=12, max_num_batched_tokens=64)
        own["num_gpu_blocks_override"] = generator.choice([8, 10, 27, 44])
    drawn = dict(
        max_num_seqs=generator.choice([2, 3, 4, 6]),
        max_num_batched_tokens=generator.choice([16, 48, 64]),
        capture_num_tokens=generator.choice([[], [8, 16]]),
        enable_cpu_offload=generator.choice(MODES),
        num_gpu_blocks_override=generator.choice([27, 44, 52, 60, 80]),
        host_memory_limit=generator.choice([60, 80, 120, 300]) * 2048,
        resident_kv_limit=generator.choice([None, 0]),
    )
    return hollow(make_engine(paths[name], **dict(max_model_len=320) | drawn | own))


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_whoever_runs_finds_what_it_was_promised(paths, group, fuzz):
    num_played = 0
    for seed in range(group, 3000, NUM_GROUPS) if fuzz else SEEDS:
        generator = random.Random(seed)
        try:
            engine = draw_engine(generator, paths)
        except ValueError:
            continue  # pools that hold no request of this length
        if engine.modes.max_sequence_tokens("offload") < 256:
            continue  # some requests would find no mode
        prompts = tree_of_prompts(generator, generator.randint(3, 12), 16)
        params = [SamplingParams(max_tokens=generator.randint(1, 60), ignore_eos=True) for _ in prompts]
        requests, comes = list(zip(prompts, params, strict=True)), generator.choice([0.2, 1.0])
        added, aborted = play_at_random(engine, requests, generator, comes=comes, is_aborted=0.02, is_switched=0.03)
        for number, request in enumerate(added):
            is_short = "above host_memory_limit" in (request.error or "")  # and it cannot give way
            reason = request.sequences[0].finish_reason
            assert reason == "length" or is_short or number in aborted, f"seed {seed}: {request.error}"
        assert_pools_as_before(engine)
        num_played += 1
    assert num_played > 5


def test_no_more_rows_are_let_in_than_leave_a_prompt_the_blocks_of_its_smallest_chunk(paths):
    """Of 64 tokens, where layers keep states: four blocks of seven."""
    arguments = dict(enable_prefix_caching=None, state_slots=12, max_num_seqs=12, num_gpu_blocks_override=8)
    engine = hollow(make_engine(paths["lfm2"], enable_cpu_offload=True, host_memory_limit=2**20, **arguments))
    requests = [([3 + i] * 150, SamplingParams(max_tokens=5, ignore_eos=True)) for i in range(8)]
    play_at_random(engine, requests, random.Random(0), comes=1.0, is_aborted=0, is_switched=0)
    assert_pools_as_before(engine)
