"""A step that repeats the one before uses what was made for it; one in which anything else changes never does."""

import functools
import random
from collections import Counter

import checksum
import pytest
import torch
from checksum.answers import check
from checksum.oracle import Oracle
from engines import (
    BLOCK_BYTES,
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_drawn_engine,
    make_engine,
    outcome,
    random_prompts,
    run,
)
from repeats import check_repeats
from request_helpers import play_at_random
from simulated import SimulatedRuntime

from nanoinfer import LLMEngine, SamplingParams
from offload import OffloadEngine, Staging

MODELS = [SMALL, SMALL | dict(sliding_window=24)]
ONE_PREFILL = dict(max_num_batched_tokens=80, capture_num_tokens=[32])
STREAMED = ONE_PREFILL | dict(enable_cpu_offload=True, ring_slot_bytes=2 * LAYER_BLOCK_BYTES, num_ring_slots=3)
KEPT = STREAMED | dict(resident_kv_limit=3 * BLOCK_BYTES)
RESIDENT = ONE_PREFILL | dict(resident_kv_limit=None)  # a switch drops none, and is one
MODES = {"resident": RESIDENT, "streamed": STREAMED, "partly kept": KEPT}


class OutOfLuck(Exception):
    """What the tests raise."""


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


# Orders of events


def draw_requests(generator: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Some with one beginning, a few of two completions, most long enough for steps in which nothing changes."""
    stem = random_prompts(1, 40, 70, seed=generator.getrandbits(30))[0]
    prompts = [
        generator.choice([[], [], stem, stem[:32]]) + random_prompts(1, 3, 80, seed=generator.getrandbits(30))[0]
        for _ in range(generator.randint(1, 4))
    ]
    params = [
        SamplingParams(
            temperature=generator.choice([0, 0.9]),
            seed=number,
            max_tokens=generator.choice([5, 40, 70, 90]),
            n=generator.choice([1, 1, 1, 1, 2]),
            ignore_eos=True,
            repetition_penalty=generator.choice([1.0, 1.0, 1.2]),
            logprobs=0,
        )
        for number in range(len(prompts))
    ]
    return list(zip(prompts, params, strict=True))


def draw_engine(generator: random.Random, path, seed: int) -> LLMEngine:
    mode = generator.choice(["auto", True, True, False])
    return make_drawn_engine(
        path,
        SimulatedRuntime(generator.choice([None, seed])),
        enable_cpu_offload=mode,
        max_num_seqs=generator.choice([1, 2, 3, 4]),
        max_model_len=256,
        max_num_batched_tokens=generator.choice([32, 64]),
        capture_num_tokens=generator.choice([[], [8, 32]]),  # with mixed steps or without
        num_gpu_blocks_override=generator.randint(18 if not mode else 14, 40),
        host_memory_limit=150 * BLOCK_BYTES,
        ring_slot_bytes=generator.choice([1, 2, 3]) * LAYER_BLOCK_BYTES,
        num_ring_slots=generator.choice([2, 3, 5]),
        resident_kv_limit=generator.choice([None, 0, 4 * BLOCK_BYTES]),
        enable_prefix_caching=generator.random() < 0.5,
    )


def disturb(engine: LLMEngine, generator: random.Random, patch: pytest.MonkeyPatch) -> Counter:
    """Let anything happen between two steps, and let steps fail at some points; return how often each happened."""
    happened, step, program = Counter(), engine.step, engine.runner.decode_program
    left = [None]  # how many calls are left until one fails
    places = [
        (engine.planner, "begin_step"), (engine.planner, "end_step"), (program, "begin"), (engine.runner, "execute"),
        (engine.runner, "sample"), (engine.runner.graphs, "run"), (Staging, "upload"), (OffloadEngine, "_fill"),
        (OffloadEngine, "_note_writes"),
    ]  # fmt: skip

    def failing(name, method, *, after):
        def wrapped(*args, **kwargs):
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    left[0] = None
                    happened[f"{name} fails {'after' if after else 'before'}"] += 1
                    if after:
                        method(*args, **kwargs)
                    raise OutOfLuck
            return method(*args, **kwargs)

        return wrapped

    for owner, name in places:
        patch.setattr(owner, name, failing(name, getattr(owner, name), after=generator.random() < 0.5))

    @torch.inference_mode()
    def disturbed_step():
        if generator.random() < 0.03:
            engine.stats()
            happened["stats"] += 1
        if generator.random() < 0.03 and engine.runner.offload.host.num_bytes > 0:
            engine.runner.offload.drain()
            happened["the prefetch is dropped"] += 1
        if generator.random() < 0.03:
            engine.runner.graphs.captured.clear()
            engine.runner.capture(may_offload=engine.runner.offload.host.num_bytes > 0)
            happened["graphs are captured"] += 1
        engine.samples_late = generator.random() < 0.5
        if generator.random() < 0.03:
            left[0] = generator.randint(0, 15)
        try:
            return step()
        except OutOfLuck:
            return []
        finally:
            left[0] = None

    engine.step = disturbed_step
    return happened


@pytest.mark.parametrize("group", range(8))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_whatever_happens_between_two_steps_a_repeat_is_one(path_of, group, fuzz, monkeypatch):
    """By the oracle's sums. What is planned and captured once stays on floats, below."""
    checksum.use(monkeypatch)
    repeats, happened = Counter(), Counter()
    for seed in range(group, 400 if fuzz else 48, 8):
        generator = random.Random(seed)
        path, requests = path_of("qwen3", **generator.choice(MODELS)), draw_requests(generator)
        engine = draw_engine(generator, path, seed)
        found = check_repeats(engine)
        with pytest.MonkeyPatch.context() as patch:
            events = disturb(engine, generator, patch)
            added, _ = play_at_random(engine, requests, generator, comes=0.05, is_aborted=0.005, is_switched=0.02)
        for request, pair in zip(added, requests, strict=True):
            check(Oracle(path), *pair, outcome(request))
        assert_pools_as_before(engine)
        happened += events
        repeats += found if engine.stats()["streamed_bytes"] else Counter()
    assert min(repeats["plans"], repeats["steps"]) > 80, f"hardly anything was repeated while KV streamed: {repeats}"
    assert len(happened) > 8, happened


# One event each

AT = 8  # steps before the event


def play(engine, event=None):
    """The tokens of two requests, and for each decode step whether its plan and its lists were those before."""
    found, made = check_repeats(engine), []
    requests = [engine.add_request(str(i), prompt, greedy(30)) for i, prompt in enumerate(random_prompts(2, 38, 38))]
    while engine.has_work:
        if len(made) == AT and event is not None:
            event(engine)
        before = found.copy()
        engine.step()
        made.append(((found - before)["plans"], (found - before)["steps"]))
    return [outcome(request) for request in requests], made


def is_aborted(engine):
    engine.abort("0")


def comes(engine):
    engine.add_request("later", [5] * 40, greedy(2))


def comes_in_a_mixed_step(engine):
    """And ends with it. Its beginning is another one's, which passes the ring once for both."""
    engine.add_request("later", engine.scheduler.running[0].prompt_token_ids[:32] + [5] * 10, greedy(1))


def is_switched(engine):
    engine.switch_mode("resident" if engine.mode == "offload" else "offload")


def is_switched_twice(engine):
    is_switched(engine)
    is_switched(engine)


def fails_before_it_is_launched(engine):
    """The request that fails alone is one that has just come: the others stay."""
    engine.add_request("later", [5] * 40, greedy(2))
    execute = engine.runner.execute

    def failing(*arguments):
        engine.runner.execute = execute
        raise OutOfLuck

    engine.runner.execute = failing
    with pytest.raises(OutOfLuck):
        engine.step()


def fails_between_two_steps(engine):
    def failing(*arguments):
        raise OutOfLuck

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OutOfLuck):
        patch.setattr(engine.modes, "switch", failing)
        is_switched(engine)


def captures(engine):
    engine.runner.graphs.captured.clear()
    with torch.inference_mode():
        engine.runner.capture(may_offload=engine.runner.offload.host.num_bytes > 0)


def loses_a_copy(engine):
    """As where another row's growth takes its room."""
    with torch.inference_mode():
        engine.kv_cache.copies.drop(1)


ALWAYS = [is_aborted, comes, fails_between_two_steps, captures]
EVENTS = {
    "resident": [*ALWAYS, is_switched, fails_before_it_is_launched],
    "streamed": [*ALWAYS, comes_in_a_mixed_step, is_switched_twice, fails_before_it_is_launched],
    "partly kept": [*ALWAYS, is_switched, is_switched_twice, loses_a_copy],
}


@pytest.fixture(scope="module")
def undisturbed_in(path_of):
    return functools.cache(lambda mode: play(make_engine(path_of("qwen3", **SMALL), **MODES[mode])))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_repeated_in_the_middle_of_a_block(undisturbed_in, mode):
    """Not where a block fills up or begins, nor behind that, where the device is told of the new block."""
    _, made = undisturbed_in(mode)
    lengths = range(38, 38 + len(made))  # that each step attends to; blocks have 16 tokens
    planned = [length % 16 for length, (is_plan, _) in zip(lengths, made, strict=True) if is_plan]
    assert set(planned) == set(range(3, 16)) and len(planned) > 14
    assert all(is_step for is_plan, is_step in made if is_plan), "a plan was repeated, and its lists were made anew"


@pytest.mark.parametrize(("mode", "event"), [(mode, event) for mode, events in EVENTS.items() for event in events])
@pytest.mark.sampled(
    *("resident-comes", "resident-is_switched", "resident-fails_before_it_is_launched", "partly kept-loses_a_copy"),
    *("partly kept-is_switched", "streamed-is_aborted", "streamed-fails_between_two_steps", "streamed-captures"),
    *("streamed-comes_in_a_mixed_step", "streamed-is_switched_twice"),
)
def test_the_step_behind_an_event_is_taken_for_no_repeat(path_of, undisturbed_in, mode, event):
    wanted, undisturbed = undisturbed_in(mode)
    engine = make_engine(path_of("qwen3", **SMALL), **MODES[mode])
    got, made = play(engine, event)
    assert undisturbed[AT] == made[AT - 1] == (1, 1)
    assert made[AT] == (event is captures, 0)  # a capture runs on other tables, but changes no plan
    assert event is not comes_in_a_mixed_step or made[AT + 1] == (0, 0)
    assert got[1] == wanted[1]
    assert got[0] == wanted[0] or event is is_aborted
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.sampled("None", "0")
def test_a_prefetch_that_was_dropped_is_brought_again_by_a_repeat(path_of, undisturbed_in, seed):
    wanted, _ = undisturbed_in("streamed")
    engine = make_engine(path_of("qwen3", **SMALL), SimulatedRuntime(seed), **STREAMED)
    got, made = play(engine, lambda engine: engine.runner.offload.drain())
    assert got == wanted and made[AT] == (1, 1)
    assert engine.stats()["discarded_prefetch_bytes"] >= 3 * 2 * LAYER_BLOCK_BYTES


@pytest.mark.parametrize("others", [[120], [5, 5, 5]])
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.sampled("None-others0", "0-others1")
def test_blocks_come_back_to_the_gpu_between_two_repeats(path_of, seed, others):
    """When other rows give their room back, the row that is left decodes alone already.

    others: tokens of the other prompts. Of 5 the host has no block that is gone then.
    """
    prompts = random_prompts(1, 115, 115) + [[7] * count for count in others]
    params = [greedy(30)] + [greedy(6)] * len(others)
    wanted = run(make_engine(path_of("qwen3", **SMALL)), prompts, params)
    given = STREAMED | dict(resident_kv_limit=None, num_gpu_blocks_override=14 if len(others) == 1 else 10)
    engine = make_engine(path_of("qwen3", **SMALL), SimulatedRuntime(seed), **given)
    found, begin_step, plans = check_repeats(engine), engine.planner.begin_step, []
    engine.planner.begin_step = lambda batch: plans.append((begin_step(batch), found["plans"])) or plans[-1][0]
    assert run(engine, prompts, params) == wanted
    alone = [number for number, (plan, _) in enumerate(plans) if len(plan.rows) == 1 and not plan.chunks]
    promoted = [number for number in alone if plans[number][0].promoted]
    assert alone[0] < promoted[0], "the first step alone had no room yet"
    assert plans[-1][1] > plans[promoted[-1]][1] + 5, "the steps behind are repeated again"


def test_a_step_that_fails_half_way_leaves_none_to_repeat(path_of, monkeypatch):
    engine, plans = make_engine(path_of("qwen3", **SMALL), **STREAMED), []
    program, begin_step = engine.runner.decode_program, engine.planner.begin_step
    engine.planner.begin_step = lambda batch: plans.append(begin_step(batch)) or plans[-1]
    play(engine, lambda engine: plans.append(program.last))
    assert plans[AT] is not None, "there was one to repeat"

    def failing(*arguments):
        raise OutOfLuck

    program.last = plans[AT]
    monkeypatch.setattr(program.attention, "upload", failing)
    with pytest.raises(OutOfLuck):
        program.begin(plans[-1])
    assert program.last is None
