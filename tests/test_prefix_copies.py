"""Offload mode: what a sequence leaves on the GPU when it ends serves the next one with the same beginning."""

from dataclasses import replace

import pytest
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from offload import SimulatedRuntime

ROOMY = dict(enable_cpu_offload=True, resident_kv_limit=None, num_gpu_blocks_override=60)
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
BEGINNING, *ENDS = random_prompts(1, 160, 160, seed=1) + random_prompts(4, 20, 20, seed=2)


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


@pytest.mark.parametrize("num_tokens", [13, 20])
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_beginning_that_is_still_on_the_gpu_does_not_stream(path, seed, num_tokens):
    """With 13 tokens the last block becomes full in the last step, and is being written to the host at the end."""
    params = replace(PARAMS, max_tokens=num_tokens)
    first = BEGINNING + ENDS[0]
    wanted, _ = play(make_engine(path), [first], params=params)
    turns = [first, first + wanted[0][0][0] + ENDS[1], BEGINNING + ENDS[2]]
    wanted, _ = play(make_engine(path), turns, params=params)
    engine = make_engine(path, SimulatedRuntime(seed), **ROOMY)
    assert play(engine, turns, params=params) == (wanted, [0, 0, 0])
    # Of 180 tokens and the generated ones 12 blocks are known: the next turn finds them all, the last prompt 10.
    assert engine.stats()["prefix_cache_hit_tokens"] == 16 * (12 + 10)
    assert_pools_as_before(engine)


def test_only_what_lost_its_room_streams_the_oldest_blocks_first(path):
    prompts = [BEGINNING + ENDS[0], random_prompts(1, 250, 250, seed=3)[0], BEGINNING + ENDS[1]]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY | dict(num_gpu_blocks_override=24))
    found = []
    admit = engine.runner.kv_cache._find_copies
    engine.runner.kv_cache._find_copies = lambda *args: found.append(admit(*args)) or found[-1]
    outcomes, streamed = play(engine, prompts)
    assert outcomes == wanted and streamed[:2] == [0, 0] and streamed[2] > 0
    assert found[:2] == [[], []] and 0 < len(found[2]) < 10
    whole = make_engine(path, **ROOMY | dict(num_gpu_blocks_override=24))
    whole.runner.kv_cache._find_copies = lambda *args: []
    assert play(whole, prompts)[1][2] > streamed[2]
    assert_pools_as_before(engine)


def test_sequences_that_run_beside_each_other_do_not_share_a_copy(path):
    """Who drops its block must free it, so the second one streams what the first one holds."""
    prompts = [BEGINNING + end for end in ENDS[:3]]
    wanted = run(make_engine(path), prompts[:1], [PARAMS]) + run(make_engine(path), prompts[1:], [PARAMS] * 2)
    engine = make_engine(path, **ROOMY)
    got = run(engine, prompts[:1], [PARAMS])
    assert engine.stats()["streamed_bytes"] == 0
    held = []

    def at_step(engine, step):
        pool = engine.runner.kv_cache.gpu_blocks
        held.extend(pool.references(block) for block in list(pool._references))

    got += run(engine, prompts[1:], [PARAMS] * 2, at_step)
    assert [outcome[0][0] for outcome in got] == [outcome[0][0] for outcome in wanted]
    assert set(held) == {1} and engine.stats()["streamed_bytes"] > 0
    assert_pools_as_before(engine)


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_what_an_aborted_or_failed_sequence_leaves_is_not_taken_up(path, end, monkeypatch):
    prompts = [BEGINNING + ENDS[0], BEGINNING + ENDS[1]]
    wanted, _ = play(make_engine(path), prompts[1:])
    engine = make_engine(path, SimulatedRuntime(), **ROOMY)
    kv_cache, run_step = engine.runner.kv_cache, engine.runner.offload.run
    engine.add_request("first", prompts[0], PARAMS)
    for _ in range(8):
        engine.step()
    if end == "failure":

        def fail(*args):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine.runner.offload, "run", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
        monkeypatch.setattr(engine.runner.offload, "run", run_step)
    engine.abort("first")
    assert kv_cache.gpu_blocks.num_cached == 0
    outcomes, streamed = play(engine, prompts[1:])
    assert outcomes == wanted and streamed[0] > 0 and engine.stats()["prefix_cache_hit_tokens"] == 160
    assert_pools_as_before(engine)


def test_the_limit_of_what_stays_on_the_gpu_holds_for_copies_too(path):
    prompts = [BEGINNING + end for end in ENDS]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY | dict(resident_kv_limit=4 * BLOCK_BYTES))
    most = []

    def at_step(engine, step):
        most.append(engine.runner.kv_cache.residency.num_resident)

    assert play(engine, prompts, at_step)[0] == wanted and max(most) == 4
    assert_pools_as_before(engine)


def test_with_a_window_nothing_is_kept(tmp_path):
    """Blocks that came back through the ring lack the layers whose window had moved on."""
    path = make_checkpoint("gemma3", tmp_path, **SMALL | dict(sliding_window=24))
    prompts = [BEGINNING + end for end in ENDS[:3]]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY)
    kv_cache = engine.runner.kv_cache
    outcomes, streamed = play(engine, prompts[:2])
    assert outcomes == wanted[:2] and streamed[1] > 0, "the second one's beginning came back through the ring"
    assert kv_cache.gpu_blocks.num_cached == 0
    engine.switch_mode("resident")
    ((*got,),) = run(engine, prompts[2:], [PARAMS])
    assert got[0][0] == wanted[2][0][0], "computed in other chunks: equal to rounding"


def test_copies_survive_a_switch_and_serve_the_other_mode(path):
    prompts = [BEGINNING + end for end in ENDS[:3]]
    wanted, _ = play(make_engine(path), prompts)
    engine = make_engine(path, **ROOMY)
    got, _ = play(engine, prompts[:1])
    engine.switch_mode("resident")
    again, _ = play(engine, prompts[1:2])
    assert engine.stats()["prefix_cache_hit_tokens"] == 160, "the GPU's copies are the resident mode's cache"
    engine.switch_mode("offload")
    last, _ = play(engine, prompts[2:])
    assert got + again + last == wanted
    assert_pools_as_before(engine)
