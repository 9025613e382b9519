"""What next prompts begin with is computed while there are no requests, and at nobody's cost."""

from dataclasses import replace

import pytest
import state_family
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.engine import ahead as module
from nanoinfer.engine.ahead import Ahead

PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=17, ignore_eos=True, logprobs=3)
MODES = {
    "resident": {},
    "streamed": dict(enable_cpu_offload=True, resident_kv_limit=0),
    "auto": dict(enable_cpu_offload="auto"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(autouse=True)
def _steps_are_as_short_as_they_may_be(monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 1e9)


def compute(engine, ahead):
    """Compute all that waits."""
    while ahead.begin():
        while engine.has_work:
            engine.step()


def found_by(engine, prompt, params=PARAMS):
    """How many tokens of a prompt are found, and what it gets."""
    before = engine.stats()["prefix_cache_hit_tokens"]
    (outcome,) = run(engine, [prompt], [params])
    return engine.stats()["prefix_cache_hit_tokens"] - before, outcome


@pytest.mark.parametrize("mode", MODES)
def test_the_next_turn_finds_its_beginning_and_has_the_bits_of_a_cold_start(path, mode):
    engine, prompt = make_engine(path, SimulatedRuntime(1), **MODES[mode]), random_prompts(1, 40, 40, seed=1)[0]
    cold = make_engine(path, **MODES[mode], enable_prefix_caching=False)
    ahead, computed = Ahead(engine), 0
    for message in random_prompts(3, 7, 30, seed=2):
        known = len(prompt) // 16 * 16
        prompt = prompt + message
        found, answer = found_by(engine, prompt)
        assert found == (known if computed else 0)
        assert answer == found_by(cold, prompt)[1]
        asked, prompt = len(prompt), prompt + list(answer[0][0])
        ahead.offer(prompt)
        compute(engine, ahead)
        computed += len(prompt) // 16 * 16 - asked // 16 * 16
        assert ahead.num_tokens == computed and not ahead.num_left_out
    assert_pools_as_before(engine)


def test_of_states_it_takes_up_none_for_good(tmp_path):
    with state_family.registered():
        engine = make_engine(state_family.write_model(tmp_path), load_format="dummy", max_num_batched_tokens=200)
        first, message, message_later = random_prompts(3, 90, 90, seed=6)
        ahead, prompt = Ahead(engine), first
        run(engine, [first], [PARAMS])
        for said in (message, message_later):
            prompt = prompt + said
            ahead.offer(prompt)
            compute(engine, ahead)
        assert found_by(engine, prompt)[0] == 256
        assert ahead.num_tokens and not ahead.num_left_out
        assert_pools_as_before(engine)


@pytest.mark.parametrize("num_steps", range(3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("resident-0", "streamed-1", "auto-2")
def test_a_request_that_comes_ends_it_and_gets_what_it_gets_alone(path, mode, num_steps):
    first, other, beginning = random_prompts(3, 90, 90, seed=3)
    unseeded = replace(PARAMS, seed=None)
    wanted = run(make_engine(path, **MODES[mode]), [first, other], [PARAMS, unseeded])
    engine = make_engine(path, SimulatedRuntime(num_steps), **MODES[mode])
    ahead, got = Ahead(engine), run(engine, [first], [PARAMS])
    ahead.offer(beginning)
    assert ahead.begin()
    for _ in range(num_steps):
        engine.step()
    ahead.stop()
    assert not engine.live.requests and ahead.is_wanted
    got += run(engine, [other], [unseeded])
    assert got == wanted
    compute(engine, ahead)
    assert found_by(engine, beginning + [7])[0] == 80 and ahead.num_tokens == 80
    ahead.offer(other)
    ahead.drop()
    assert not ahead.is_wanted and not ahead.begin(), "what was dropped is computed all the same"
    assert_pools_as_before(engine)


def test_it_is_computed_in_steps_that_are_short_enough(path, monkeypatch):
    engine, (first, beginning) = make_engine(path), random_prompts(2, 100, 100, seed=4)
    ahead = Ahead(engine)
    ahead.offer(beginning)
    assert not ahead.begin() and ahead.num_left_out == 1, "nothing is known of how long a step takes"
    run(engine, [first], [PARAMS])
    monkeypatch.setattr(module, "MAX_SECONDS", 1.0)
    for tokens_per_second, ends in ((50, [48, 96]), (40, [32, 64, 96]), (1000, [48, 96]), (15, [])):
        engine = make_engine(path)
        run(engine, [first], [PARAMS])
        engine.meter.prefill_seconds = engine.meter.num_prefill_tokens / tokens_per_second
        ahead, seen = Ahead(engine), []
        ahead.offer(beginning)
        while ahead.begin():
            (request,) = engine.live.requests.values()
            seen.append(len(request.prompt_token_ids) - 1)
            while engine.has_work:
                engine.step()
            engine.meter.prefill_seconds = engine.meter.num_prefill_tokens / tokens_per_second
        assert seen == ends and ahead.num_left_out == (not ends) and ahead.num_tokens == (96 if ends else 0)


def test_it_takes_no_block_that_was_asked_for(path):
    """A pool of 26 blocks: 6 of each of two prompts that came twice, 6 of one that came once, and 8 that are free."""
    engine, short = make_engine(path, num_gpu_blocks_override=27), replace(PARAMS, max_tokens=1)
    once, *often, beginning = random_prompts(3, 100, 100, seed=5) + random_prompts(1, 240, 240, seed=7)
    for prompt in [once, *often, *often]:
        run(engine, [prompt], [short])
    ahead = Ahead(engine)
    ahead.offer(beginning[:192])
    compute(engine, ahead)
    assert ahead.num_tokens == 192 and not ahead.num_left_out, "some of what came once is gone"
    ahead.offer(beginning)
    compute(engine, ahead)
    assert ahead.num_tokens == 192 and ahead.num_left_out == 1
    assert [found_by(engine, prompt, short)[0] for prompt in often] == [96, 96]
    assert found_by(engine, once, short)[0] < 96
    assert_pools_as_before(engine)


def test_with_experts_in_slots_and_where_much_is_streamed_it_is_left_out(path, monkeypatch):
    engine, (first, beginning) = make_engine(path), random_prompts(2, 100, 100, seed=8)
    run(engine, [first], [PARAMS])
    for change in (dict(num_expert_slots=4), dict(streamed_bytes=10**15)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "MAX_SECONDS", 0.25)
            patch.setattr(engine, "plan", replace(engine.plan, **change))
            ahead = Ahead(engine)
            ahead.offer(beginning)
            assert not ahead.begin() and ahead.num_left_out == 1 and not ahead.is_wanted


def test_its_error_ends_it_alone(path, monkeypatch):
    engine, (first, beginning) = make_engine(path), random_prompts(2, 100, 100, seed=9)
    wanted = found_by(engine, first)
    ahead = Ahead(engine)
    ahead.offer(beginning)
    assert ahead.begin()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(engine.runner, "execute", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        engine.step()
    assert not engine.has_work
    assert not ahead.begin() and ahead.num_left_out == 1, "it is not tried for ever"
    assert found_by(engine, first)[1] == wanted[1]
    assert_pools_as_before(engine)


def test_a_later_turn_replaces_earlier_ones_and_the_newest_come_first(path):
    engine = make_engine(path, max_num_seqs=2)
    run(engine, random_prompts(1, 40, 40, seed=1), [PARAMS])
    one, two, three = random_prompts(3, 60, 60, seed=10)
    ahead, order = Ahead(engine), []
    for beginning in (one, two, one + one, three, two[:15], two):
        ahead.offer(beginning)
    while ahead.begin():
        (request,) = engine.live.requests.values()
        order.append(request.prompt_token_ids[:-1])
        while engine.has_work:
            engine.step()
    assert order == [two[:48], three[:48]], "two wait at most, and of 15 tokens no block becomes full"
