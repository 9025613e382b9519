"""Offload mode: what a sequence leaves on the GPU when it ends serves the next one with the same beginning."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from engines import BLOCK_BYTES, LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from offload.lifetimes import GPU_RULE, WRITES

ROOMY = dict(enable_cpu_offload=True, resident_kv_limit=None, num_gpu_blocks_override=60)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
BEGINNING, *ENDS = random_prompts(1, 160, 160, seed=1) + random_prompts(4, 28, 28, seed=2)
PROMPTS = [BEGINNING + end for end in ENDS]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def play(engine, prompts, at_step=None, params=PARAMS):
    """The outcome of each prompt alone, one after the other, and the bytes that each streamed."""
    outcomes, streamed = [], []
    for prompt in prompts:
        before = engine.stats()["streamed_bytes"]
        outcomes += run(engine, [prompt], [params], at_step)
        streamed.append(engine.stats()["streamed_bytes"] - before)
    return outcomes, streamed


@pytest.fixture(scope="module")
def in_turn(path):
    """What each of `PROMPTS` gets in resident mode, one after the other."""
    return play(make_engine(path), PROMPTS)[0]


@pytest.fixture(scope="module")
def turns_of(path):
    """Number of tokens -> parameters, a prompt, its next turn, another one, and what they get in resident mode."""

    @cache
    def turns(num_tokens):
        engine, params, first = make_engine(path), replace(PARAMS, max_tokens=num_tokens), PROMPTS[0]
        wanted, _ = play(engine, [first], params=params)
        others = [first + wanted[0][0][0] + ENDS[1], PROMPTS[2]]
        return params, [first, *others], wanted + play(engine, others, params=params)[0]

    return turns


@pytest.fixture(scope="module")
def second_alone(path):
    """What the second one of `PROMPTS` gets without the first."""
    return play(make_engine(path), PROMPTS[1:2])[0]


def half_way(path, prompt):
    """An engine with a request, "first", that has some of its tokens."""
    engine = make_engine(path, SimulatedRuntime(), **ROOMY)
    engine.add_request("first", prompt, PARAMS)
    for _ in range(6):
        engine.step()
    return engine


@pytest.mark.parametrize("num_tokens", [5, 8])
@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.sampled("None-5", "1-5", "2-8")
def test_a_beginning_that_is_still_on_the_gpu_does_not_stream(path, turns_of, seed, num_tokens):
    """With 5 tokens the last block becomes full in the last step, and is being written to the host at the end."""
    params, turns, wanted = turns_of(num_tokens)
    engine = make_engine(path, SimulatedRuntime(seed), **ROOMY)
    assert play(engine, turns, params=params) == (wanted, [0, 0, 0])
    # Of the first prompt's 188 tokens 11 blocks are known: the next turn finds them all, the last prompt 10.
    assert engine.stats()["prefix_cache_hit_tokens"] == 16 * (11 + 10)
    assert_pools_as_before(engine)


def test_a_block_that_is_taken_back_and_dropped_still_waits_for_its_write_through(path, fuzz):
    """Who gets it next would overwrite what is being sent to the host."""
    num_deferred = 0
    for seed in range(8 if fuzz else 2):
        engine = make_engine(path, SimulatedRuntime(seed), **ROOMY)
        play(engine, [PROMPTS[0]], params=replace(PARAMS, max_tokens=5))
        lifetimes, pool = engine.kv_cache.tables.lifetimes, engine.kv_cache.tables.gpu_blocks
        unread = [(number, event) for number, event in engine.runner.offload.unread[GPU_RULE, WRITES]]
        running = {number for number, event in unread if not event.is_reached}
        waiting = [deferred for deferred in lifetimes.deferred_gpu if deferred.writes in running]
        for block in [deferred.blocks[0] for deferred in waiting[:1]]:
            num_free, num_deferred = pool.num_free, num_deferred + 1
            assert lifetimes.take_back_gpu(block) and not lifetimes.take_back_gpu(block)
            lifetimes.release_gpu([block])
            assert pool.num_free == num_free and pool.references(block) == 1, "handed out while it is read"
            lifetimes.wait_for_gpu(pool.num_blocks)
            assert pool.references(block) == 0 and not lifetimes.take_back_gpu(block)
        assert_pools_as_before(engine)
    assert num_deferred


def test_only_what_lost_its_room_streams_the_oldest_blocks_first(path):
    prompts = [PROMPTS[0], random_prompts(1, 250, 250, seed=3)[0], PROMPTS[1]]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY | dict(num_gpu_blocks_override=24))
    found = []
    admit = engine.kv_cache.copies.find
    engine.kv_cache.copies.find = lambda *args: found.append(admit(*args)) or found[-1]
    outcomes, streamed = play(engine, prompts)
    assert outcomes == wanted and streamed[:2] == [0, 0] and streamed[2] > 0
    assert found[:2] == [[], []] and 0 < len(found[2]) < 10
    whole = make_engine(path, **ROOMY | dict(num_gpu_blocks_override=24))
    whole.kv_cache.copies.find = lambda *args: []
    assert play(whole, prompts)[1][2] > streamed[2]
    assert_pools_as_before(engine)


def test_sequences_that_run_beside_each_other_share_a_copy(path):
    prompts = PROMPTS[:3]
    wanted = run(make_engine(path), prompts[:1], [PARAMS]) + run(make_engine(path), prompts[1:], [PARAMS] * 2)
    engine = make_engine(path, **ROOMY)
    got = run(engine, prompts[:1], [PARAMS])
    held = []

    def at_step(engine, step):
        pool = engine.kv_cache.tables.gpu_blocks
        held.extend(pool.references(block) for block in list(pool.holders))

    got += run(engine, prompts[1:], [PARAMS] * 2, at_step)
    assert [outcome[0][0] for outcome in got] == [outcome[0][0] for outcome in wanted]
    assert set(held) == {1, 2} and engine.stats()["streamed_bytes"] == 0
    assert_pools_as_before(engine)


def test_what_a_failed_step_leaves_is_not_taken_up(path, second_alone, monkeypatch):
    engine = half_way(path, PROMPTS[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.offload, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.kv_cache.tables.gpu_blocks.num_cached == 0
    outcomes, streamed = play(engine, PROMPTS[1:2])
    assert outcomes == second_alone and streamed[0] > 0 and engine.stats()["prefix_cache_hit_tokens"] == 160
    assert_pools_as_before(engine)


def test_what_an_aborted_request_leaves_is_taken_up(path, second_alone):
    engine = half_way(path, PROMPTS[0])
    engine.abort("first")
    assert play(engine, PROMPTS[1:2]) == (second_alone, [0]) and engine.stats()["prefix_cache_hit_tokens"] == 160
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled("1")
def test_a_copy_is_one_of_the_block_that_the_host_has(path, seed):
    """Two that run beside each other compute their beginning in chunks of their own: only one of them is the host's."""
    beside = [replace(PARAMS, max_tokens=12), replace(PARAMS, max_tokens=2)]
    outcomes = []
    for takes_copies in (True, False):
        engine = make_engine(path, SimulatedRuntime(seed), **ROOMY | dict(max_num_batched_tokens=100))
        run(engine, PROMPTS[:2], beside)
        assert_pools_as_before(engine)  # compares all copies with the host's
        if not takes_copies:
            engine.kv_cache.copies.find = lambda begin, host_blocks: []
        outcomes.append(play(engine, [PROMPTS[2]])[0])
    assert outcomes[0] == outcomes[1]


def test_a_host_block_that_is_handed_out_again_has_no_copy(path):
    prompts = [PROMPTS[0], *random_prompts(3, 180, 180, seed=5), PROMPTS[1]]
    wanted, _ = play(make_engine(path, enable_prefix_caching=False), prompts)
    engine = make_engine(path, **ROOMY | dict(host_memory_limit=26 * BLOCK_BYTES, num_gpu_blocks_override=80))
    outcomes, _ = play(engine, prompts)
    tokens = [[outcome[0] for outcome in found] for found in outcomes]
    assert tokens == [[outcome[0] for outcome in found] for found in wanted]
    assert engine.stats()["prefix_cache_hit_tokens"] < 160, "the host lost some of the beginning"
    assert_pools_as_before(engine)


def test_the_limit_of_what_stays_on_the_gpu_holds_for_copies_too(path, in_turn):
    engine = make_engine(path, **ROOMY | dict(resident_kv_limit=4 * BLOCK_BYTES))
    residency = engine.kv_cache.copies.residency
    assert play(engine, PROMPTS[:2])[0] == in_turn[:2]
    other = engine.add_request("other", random_prompts(1, 150, 150, seed=8)[0], PARAMS)
    while other.sequences[0].num_generated < 2:
        engine.step()
    assert residency.num_resident == 4
    engine.add_request("next", BEGINNING + ENDS[2][:5], PARAMS)  # whose steps make no block full
    for _ in range(3):
        engine.step()
        assert residency.num_resident == 4
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


def test_with_windows_copies_stay_as_without(tmp_path):
    path = make_checkpoint("gemma3", tmp_path, **SMALL | dict(sliding_window=24))
    prompts = PROMPTS[:3]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY)
    kv_cache = engine.kv_cache
    outcomes, streamed = play(engine, prompts[:2])
    assert outcomes == wanted[:2] and streamed[1] <= LAYER_BLOCK_BYTES, "but for what its window saw at its end"
    assert kv_cache.tables.gpu_blocks.num_cached > 0
    engine.switch_mode("resident")
    assert run(engine, prompts[2:], [PARAMS]) == wanted[2:]


def test_copies_survive_the_other_mode(path, in_turn):
    engine = make_engine(path, **ROOMY)
    got, _ = play(engine, PROMPTS[:1])
    engine.switch_mode("resident")
    play(engine, random_prompts(1, 100, 100, seed=7))
    engine.switch_mode("offload")
    assert play(engine, PROMPTS[1:2]) == (in_turn[1:2], [0]) and got == in_turn[:1]
    assert_pools_as_before(engine)


def test_copies_that_were_taken_up_are_in_the_cache_of_resident_mode(path):
    engine = make_engine(path, **ROOMY)
    play(engine, [PROMPTS[0]])
    taker = engine.add_request("taker", PROMPTS[1], PARAMS)
    while taker.sequences[0].num_generated < 2:
        engine.step()
    engine.switch_mode("resident")
    before = engine.stats()["prefix_cache_hit_tokens"]
    wanted, _ = play(make_engine(path), [PROMPTS[0], PROMPTS[2]])
    (((tokens, *_),),), _ = play(engine, [PROMPTS[2]])
    assert tokens == wanted[1][0][0], "beside another one: equal to rounding"
    assert engine.stats()["prefix_cache_hit_tokens"] - before == 160
    assert_pools_as_before(engine)


def test_rows_that_share_blocks_behind_one_of_their_own_share_them_in_offload_mode_too(path):
    """Of two beginnings in the GPU pool one may begin with blocks of another sequence: the shared ones come later."""
    engine = make_engine(path, **ROOMY | dict(num_gpu_blocks_override=70, max_num_batched_tokens=256))
    kv_cache, long = engine.kv_cache, replace(PARAMS, max_tokens=30, logprobs=None)
    engine.switch_mode("resident")
    for number in range(2):
        engine.add_request(str(number), BEGINNING + ENDS[number], long)
        for _ in range(3):
            engine.step()
    rows = [sequence.row for sequence in engine.scheduler.running]
    pool, (first, second) = kv_cache.tables.gpu_blocks, kv_cache.tables.gpu[0, rows, 0].tolist()
    assert first == second, "the beginning is shared"
    (own,) = pool.allocate(1)
    with torch.inference_mode():
        engine.runner.gpu_kv[:, own] = engine.runner.gpu_kv[:, first]
    kv_cache.tables.gpu[0, rows[1], 0] = own
    kv_cache.tables.gpu_versions[rows[1]] += 1
    pool.release([first])
    engine.switch_mode("offload")
    held, (a, b) = kv_cache.tables.gpu[0, rows], rows
    held = Counter(held[held >= 0].tolist())
    assert all(pool.references(block) == count for block, count in held.items()) and max(held.values()) == 2
    is_shared = (kv_cache.tables.gpu[0, a] == kv_cache.tables.gpu[0, b]) & (kv_cache.tables.gpu[0, a] >= 0)
    assert is_shared.sum() == 9 and not is_shared[0]
    assert np.array_equal(kv_cache.tables.host[0, a][is_shared], kv_cache.tables.host[0, b][is_shared])
    lifetimes, num_resident = kv_cache.tables.lifetimes, kv_cache.copies.num_resident
    num_free = pool.num_free + lifetimes.num_deferred_gpu
    assert kv_cache.copies.num_obtainable == num_free + num_resident - kv_cache.tables.promised.sum()
    kv_cache.copies.drop(num_resident)  # really free, whoever shared them
    assert pool.num_free + lifetimes.num_deferred_gpu == num_free + num_resident
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)
