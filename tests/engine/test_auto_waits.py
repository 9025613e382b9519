"""With `enable_cpu_offload="auto"` every request that was accepted ends, and none waits for long, whatever the others
are.

Engines that compute nothing play the same requests with "auto" and with True. Waits are counted in steps.
"""

import random
from dataclasses import replace

import pytest
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts
from hollow import hollow
from request_helpers import play_in_steps
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import LLMEngine, SamplingParams

BLOCK_BYTES = LAYER_BLOCK_BYTES  # of one layer
ARGUMENTS = dict(resident_kv_limit=None, ring_slot_bytes=2 * BLOCK_BYTES, num_ring_slots=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL | dict(num_layers=1))


def small_engine(
    path, mode: str | bool, num_gpu_blocks: int, num_host_blocks: int, seed: int | None = None, **arguments
) -> LLMEngine:
    """An engine with so many KV blocks, the scratch block not counted, or with fewer that all rows cannot fill."""
    pools = dict(num_gpu_blocks_override=num_gpu_blocks + 1, host_memory_limit=num_host_blocks * BLOCK_BYTES)
    engine = make_engine(path, SimulatedRuntime(seed), enable_cpu_offload=mode, **pools, **(ARGUMENTS | arguments))
    tables = engine.kv_cache.tables
    assert tables.gpu_blocks.num_blocks == num_gpu_blocks or tables.all_sequences_fit
    return engine


def hollow_engine(*given, **arguments) -> LLMEngine:
    return hollow(small_engine(*given, **arguments))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_what_only_resident_mode_can_hold_ends_though_others_would_spill(path):
    """Twelve host blocks: eleven small requests could spill, and then the huge one would find no mode that holds it."""
    lengths = dict(max_num_seqs=12, max_model_len=256, max_num_batched_tokens=32)
    with pytest.warns(UserWarning, match="holds 207 tokens of a request, .*: raise host_memory_limit"):
        engine = hollow_engine(path, "auto", 16, 12, **lengths)
    assert not engine.modes.may_spill and not engine.stats()["notes"]
    small = [(0, prompt, greedy(17)) for prompt in random_prompts(11, 10, 14, seed=1)]
    (huge,) = random_prompts(1, 200, 200, seed=2)
    played = play_in_steps(engine, [*small, (0, huge, greedy(30)), (0, huge[:20], greedy(5))])
    assert engine.mode == "resident" and engine.scheduler.num_preemptions
    assert [request.finish_reason for request in played] == ["length"] * 13
    assert_pools_as_before(engine)


@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_what_may_be_asked_for_does_not_depend_on_the_mode_that_auto_is_in(path):
    for num_host_blocks in (5, 10, 16, 20):
        engine = hollow_engine(path, "auto", 10, num_host_blocks, max_num_seqs=4, max_model_len=None)
        longest = engine.plan.max_model_len
        assert longest == 16 * max(10, num_host_blocks)
        requests = [(0, [5] * 20, greedy(120)) for _ in range(4)]
        play_in_steps(engine, [*requests, (0, [5] * (longest - 9), greedy(9))])
        assert engine.mode == ("offload" if num_host_blocks > 10 else "resident")
        play_in_steps(engine, [(0, [5] * (longest - 9), greedy(9))])
        assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", ["offload", "resident"])
def test_a_huge_request_holds_up_neither_small_ones_nor_itself(path, mode):
    """A small one runs for long, a huge one comes, and twenty small ones behind it."""
    (huge,), small = random_prompts(1, 900, 900, seed=2), random_prompts(20, 10, 20, seed=3)
    requests = [(0, small[0], greedy(600)), (5, huge, greedy(20)), *((5, prompt, greedy(10)) for prompt in small)]
    lengths = dict(max_num_seqs=32, max_model_len=1024, max_num_batched_tokens=32)
    played = {}
    for auto in ("auto", True):
        engine = hollow_engine(path, auto, 48, 300, **lengths)
        if auto != mode and mode == "offload" and auto == "auto":
            engine.switch_mode("offload")
        played[auto] = play_in_steps(engine, requests)
        assert_pools_as_before(engine)
    ours, theirs = ([request.first_token for request in played[auto]] for auto in ("auto", True))
    assert max(ours[2:]) <= max(theirs[2:]), "the small ones"
    assert theirs[1] < ours[1] <= 2 * theirs[1], "the huge one is held back, and not for long"


def test_who_holds_the_hosts_last_blocks_ends_before_one_that_outgrows_the_gpu(path):
    """A small request gives way beside one that grows to all that the host holds: it comes back first."""
    lengths = dict(max_num_seqs=4, max_model_len=272, max_num_batched_tokens=64)
    huge, small = (random_prompts(1, count, count, seed=count)[0] for count in (230, 10))
    engine = hollow_engine(path, "auto", 16, 17, **lengths)
    with pytest.warns(UserWarning, match="offload mode cannot be entered"):
        played = play_in_steps(engine, [(0, huge, greedy(42)), (0, small, greedy(60))])
    assert [request.finish_reason for request in played] == ["length"] * 2 and engine.scheduler.num_preemptions == 2
    assert played[1].end < played[0].end and engine.mode == "offload"
    assert_pools_as_before(engine)


def test_requests_that_may_grow_to_the_longest_run_at_once(path):
    """Each may grow to all of the host, which none of them does."""
    engine = hollow_engine(path, "auto", 40, 80, max_num_seqs=8, max_model_len=None)
    for number, prompt in enumerate(random_prompts(8, 20, 20, seed=3)):
        engine.add_request(str(number), prompt, greedy(engine.plan.max_model_len - len(prompt)))
    while any(request.sequences[0].num_sampled < 9 for request in engine.live.requests.values()):
        engine.step()
    assert len(engine.scheduler.running) == 8 and engine.mode == "resident"


def test_a_short_prompt_passes_where_those_before_it_find_room_behind_it(path):
    lengths = dict(max_num_seqs=4, max_model_len=2000, max_num_batched_tokens=32)
    long, longer, short = (random_prompts(1, count, count, seed=count)[0] for count in (600, 601, 10))
    engine = hollow_engine(path, "auto", 151, 151, **lengths)
    played = play_in_steps(engine, [(0, long, greedy(1300)), (0, longer, greedy(1300)), (0, short, greedy(5))])
    assert played[2].first_token < 10 < played[0].first_token


def test_whoever_passes_an_older_prompt_leaves_it_room_on_the_host(path):
    """The third has least left and passes the second, whose room on the GPU it grows into: the host has some for
    all, or it does not pass."""
    requests = [(0, prompt, greedy(count)) for prompt, count in zip(
        (random_prompts(1, length, length, seed=length)[0] for length in (39, 55, 16)), (41, 1, 60), strict=True
    )]  # fmt: skip
    lengths = dict(max_num_seqs=4, max_model_len=80, max_num_batched_tokens=16)
    first, second, third = play_in_steps(hollow_engine(path, "auto", 8, 10, **lengths), requests)
    assert second.end < third.end < 100 and second.first_token < first.end


def draw(generator: random.Random) -> tuple[dict, list[tuple[int, list[int], SamplingParams]]]:
    """Pools against each other, and requests against the pools, most with a beginning from a tree."""
    chunk = generator.choice([16, 32, 64])
    num_gpu = max(generator.choice([8, 12, 16, 24, 40]), chunk // 16 + 2)
    num_host = max(1, int(num_gpu * generator.choice([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2])))
    most = 16 * max(2, int(max(num_gpu, num_host) * generator.choice([0.5, 1, 1])))
    beginnings: list[list[int]] = [[]]
    for _ in range(generator.randint(1, 6)):
        length = generator.choice([16, 16, 32, 48, 5, 27])
        beginnings.append(generator.choice(beginnings) + tokens(generator, length))
    requests, step, order = [], 0, generator.choice(["at once", "one by one", "in waves"])
    for i in range(generator.randint(4, 24)):
        shortest, longest = generator.choice([(1, 20), (1, 20), (1, 20), (10, most // 3 + 10), (most // 2, most)])
        beginning = generator.choice(beginnings) if generator.random() < 0.6 else []
        prompt = (beginning + tokens(generator, generator.randint(shortest, longest)))[: most - 1]
        max_tokens = min(generator.choice([1, 3, 10, 30, 60]), most - len(prompt))
        requests.append((step, prompt, greedy(max_tokens)))
        if order == "one by one" or order == "in waves" and i % 5 == 4:
            step += generator.randint(0, 6) if order == "one by one" else generator.randint(10, 40)
    arguments = dict(
        num_gpu_blocks=num_gpu,
        num_host_blocks=num_host,
        max_num_batched_tokens=chunk,
        max_num_seqs=generator.choice([2, 4, 8, 12]),
        max_model_len=most,
        enable_prefix_caching=generator.random() < 0.8,
        capture_num_tokens=generator.choice([[], [8, 16]]),
    )
    return arguments, requests


def tokens(generator: random.Random, count: int) -> list[int]:
    return random_prompts(1, count, count, seed=generator.getrandbits(30))[0]


NUM_GROUPS = 4


@pytest.mark.parametrize("group", range(16))
@pytest.mark.sampled("15")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_the_same_workloads_give_the_bits_of_resident_mode(path, group, fuzz):
    """Whoever passes, is held back, gives way or streams, in any order of the streams."""
    num_streaming = 0
    for seed in range(group, 400 if fuzz else 16, 16):
        arguments, requests = draw(random.Random(seed))
        if seed % 2:
            sampled = [replace(params, temperature=0.9, seed=i) for i, (*_, params) in enumerate(requests)]
            requests = [(step, prompt, params) for (step, prompt, _), params in zip(requests, sampled, strict=True)]
        engine = small_engine(path, "auto", seed=seed, **arguments)
        found = [request.token_ids for request in play_in_steps(engine, requests)]
        num_streaming += engine.stats()["streamed_bytes"] > 0
        assert_pools_as_before(engine)
        wide = make_engine(path, max_model_len=arguments["max_model_len"], max_num_seqs=12)
        assert found == [request.token_ids for request in play_in_steps(wide, requests)], f"seed {seed}"
    assert num_streaming


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_every_request_ends_and_none_waits_three_times_as_long_as_with_true(path, group, fuzz):
    """Those that True refuses are played as well, but "auto" is compared without them."""
    num_spilled = num_compared = num_longer = 0
    for seed in range(group, 2000 if fuzz else 7 * NUM_GROUPS, NUM_GROUPS):
        arguments, requests = draw(random.Random(seed))
        num_host = arguments["num_host_blocks"]
        engine = hollow_engine(path, "auto", **arguments)
        for request in play_in_steps(engine, requests):
            assert request.finish_reason == "length", f"seed {seed}: {request}"
        num_spilled += engine.mode == "offload"
        assert_pools_as_before(engine)
        both = [r for r in requests if (len(r[1]) + r[2].max_tokens) // 16 <= num_host]
        arguments["max_model_len"] = min(arguments["max_model_len"], 16 * num_host)
        both = [r for r in both if len(r[1]) + r[2].max_tokens <= arguments["max_model_len"]]
        if not both or num_host < 2:
            continue
        ours, theirs = (play_in_steps(hollow_engine(path, mode, **arguments), both) for mode in ("auto", True))
        # Who comes while a long prompt is computed waits for that in either mode, but it is at another time.
        longest = 2 * -(-max(len(prompt) for _, prompt, _ in both) // arguments["max_num_batched_tokens"])
        for request, other in zip(ours, theirs, strict=True):
            waits = [(request.first_token, other.first_token), (request.end, other.end)]
            assert all(wait <= 3 * with_true + longest for wait, with_true in waits), f"seed {seed}: {request}, {other}"
            num_longer += any(wait > 3 * with_true for wait, with_true in waits)
            num_compared += 1
    assert num_spilled > 2 and num_compared > 50 and num_longer <= num_compared // 50
