"""Budgets of thinking in an engine: the same tokens in every mode and batch, and no other row's bits change."""

import json
import random

import pytest
from engines import assert_pools_as_before, make_engine, outcome, random_prompts, read_at_once, run
from guessing import check_alone
from prefill_graphs import WarmUpRuntime
from request_helpers import Script, play, shrink_gpu_pool
from simulated import RaceError, SimulatedRuntime
from structured import END, fulfils, make_structured_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.common.errors import RequestError

ARGUMENTS = dict(
    max_num_batched_tokens=48, max_model_len=128, capture_num_tokens=[4, 24, 40], skip_tokenizer_init=False
)
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True, num_ring_slots=2),
}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
FORM = dict(structured_outputs=dict(json=SCHEMA, disable_any_whitespace=True))
PLAIN = (1, 5)  # without a budget
BUDGETS = {0: 0, 2: 1, 3: 4, 4: 6, 6: 5, 7: 300, 8: 6}
ARRIVALS = {0: [0, 1], 3: [2, 3, 4], 5: [5, 6], 8: [7, 8]}


@pytest.fixture(scope="module", params=["a token", "texts"])
def path(request, tmp_path_factory):
    added = ("<think>", "</think>") if request.param == "a token" else ()
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"), added=added)


def asked(tokenizer) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, the most of which end with the begin of thinking, and their parameters."""
    begin = tokenizer.encode("<think>\n", add_special_tokens=False)
    prompts = random_prompts(2, 49, 52, seed=3) + random_prompts(7, 3, 25, seed=4)
    end, pairs = tokenizer.convert_tokens_to_ids(END), []
    for number, prompt in enumerate(prompts):
        others = [{}, dict(repetition_penalty=1.3), dict(top_k=20, n=2), FORM, dict(logprobs=1), {}, FORM][number % 7]
        given = dict(temperature=1.0, seed=number, max_tokens=13 + number, logit_bias={end: -100.0}) | others
        if "structured_outputs" in others:
            given |= dict(max_tokens=50, logit_bias=None)
        params = SamplingParams(**given, thinking_token_budget=BUDGETS.get(number))
        pairs.append(([*prompt, *begin], params))
    return pairs


@pytest.fixture(scope="module")
def wanted(path):
    """What is asked for, and the outcome of each request alone, one step at a time, each read before the next."""
    engine = read_at_once(make_engine(path, enforce_eager=True, **ARGUMENTS))
    pairs = asked(engine.tokenizer)
    alone = [run(engine, [prompt], [params])[0] for prompt, params in pairs]
    engine.close()
    return pairs, alone


def test_drafts_end_before_the_budget_and_give_the_bits_of_none(path, wanted):
    pairs, alone = wanted
    engine = make_engine(path, **ARGUMENTS | VARIANTS["offload"], speculative_config=dict(method="suffix"))
    counts = check_alone(engine, pairs, alone, seed=2)
    assert sum(map(bool, counts)) >= 7, counts
    assert_pools_as_before(engine)


def script(pairs, **others) -> Script:
    return Script({step: [pairs[i] for i in numbers] for step, numbers in ARRIVALS.items()}, **others)


def test_thinking_ends_when_the_budget_is_used_up_and_a_form_begins_behind_it(path, wanted):
    pairs, alone = wanted
    engine = make_engine(path, **ARGUMENTS)
    end = tuple(engine.tokenizer.encode("</think>", add_special_tokens=False))
    for number, ((_, params), completions) in enumerate(zip(pairs, alone, strict=True)):
        for tokens, logprobs, reason in completions:
            places = [at for at in range(len(tokens)) if tuple(tokens[at : at + len(end)]) == end]
            if BUDGETS.get(number, 300) == 300:  # beyond max_tokens, or none
                assert reason == "length" and not places
                continue
            assert BUDGETS[number] <= places[0] <= BUDGETS[number] + 3, "inside a character it waits"
            assert "\ufffd" != engine.tokenizer.decode(tokens[: places[0]])[-1:] or places[0] == BUDGETS[number] + 3
            if params.structured_outputs is not None:
                text = engine.tokenizer.decode(tokens[places[0] + len(end) :], skip_special_tokens=True)
                assert reason == "stop" and fulfils(json.loads(text), SCHEMA)
            else:
                assert reason == "length" and len(tokens) == params.max_tokens
            if params.logprobs is not None:
                assert logprobs[places[0]][end[0]].logprob == 0, "nothing else could come"
    engine.close()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("texts-resident-0", "a token-offload-0")
def test_every_mode_and_batch_gives_the_tokens_of_a_request_alone(path, wanted, variant, seed):
    pairs, alone = wanted
    engine = make_engine(path, WarmUpRuntime(seed=seed), **ARGUMENTS | VARIANTS[variant])
    assert play(engine, script(pairs)).outcomes == alone
    assert_pools_as_before(engine)
    engine.close()


@pytest.mark.parametrize("mode", ["resident", "switching"])
@pytest.mark.sampled("a token-resident", "texts-switching")
def test_preemption_and_switches_change_no_token(path, wanted, mode):
    pairs, alone = wanted
    how = dict(enable_cpu_offload="auto" if mode == "switching" else False)
    engine = make_engine(path, SimulatedRuntime(3), **ARGUMENTS | how)
    give_back = shrink_gpu_pool(engine, dict(resident=11, switching=60)[mode])
    modes = {4: "offload", 9: "resident", 13: "offload"} if mode == "switching" else {}
    assert play(engine, script(pairs, modes=modes)).outcomes == alone
    assert mode != "resident" or engine.scheduler.num_preemptions > 0
    give_back()
    assert_pools_as_before(engine)
    engine.close()


def test_the_host_waits_only_where_the_budget_may_be_used_up(path, wanted):
    engine, (pairs, alone) = make_engine(path, **ARGUMENTS), wanted
    needed, (prompt, params) = [], pairs[0]
    request = engine.add_request("a", prompt, SamplingParams(**vars(params) | dict(thinking_token_budget=6)))
    while engine.has_work:
        (sequence,) = request.sequences
        needed.append((sequence.num_sampled, sequence.needs_mask))
        engine.step()
    thought = [number for number, is_needed in needed if is_needed]
    assert thought and min(thought) >= 5 and max(thought) < 6 + 3 + 9 + 2, needed
    assert run(engine, [pairs[i][0] for i in PLAIN], [pairs[i][1] for i in PLAIN]) == [alone[i] for i in PLAIN]
    engine.close()


def test_a_removed_wait_is_noticed(path, wanted):
    pairs, alone = wanted
    for seed in range(40):
        engine = make_engine(path, SimulatedRuntime(seed, "host.read_after_step"), **ARGUMENTS, enforce_eager=True)
        try:
            if play(engine, script(pairs)).outcomes != alone:
                return
        except (RaceError, AssertionError, IndexError, ValueError, OverflowError):
            return
    pytest.fail("40 seeds ran and nothing went wrong")


def test_what_forbids_the_end_is_refused_before_anything_runs(path):
    engine = make_engine(path, **ARGUMENTS)
    end = engine.tokenizer.encode("</think>", add_special_tokens=False)
    for given, fault in (
        (dict(allowed_token_ids=[5, 6]), "allowed_token_ids"),
        (dict(bad_words=["</think>"]), "bad_words"),
        (dict(stop_token_ids=end[-1:], min_tokens=4), "min_tokens"),
    ):
        with pytest.raises(RequestError, match=f"thinking_token_budget needs the tokens .* which {fault} forbids"):
            engine.add_request("a", [1, 2], SamplingParams(thinking_token_budget=3, **given))
    assert not engine.has_work
    engine.close()
    bare = make_engine(path)
    with pytest.raises(RequestError, match="thinking_token_budget is not possible, as there is no tokenizer"):
        bare.add_request("a", [1, 2], SamplingParams(thinking_token_budget=3))
    bare.close()


def test_llm_streams_the_same(path):
    with LLM(path, **ARGUMENTS, block_size=16, dtype="float32", device="cpu", progress_bar=False) as llm:
        params = SamplingParams(
            temperature=1, seed=random.Random(1).randrange(99), max_tokens=24, thinking_token_budget=5
        )
        (whole,) = llm.generate("Q?<think>\n", params)
        pieces = list(llm.generate_stream("Q?<think>\n", params))
        assert [token for piece in pieces for token in piece.token_ids_delta] == list(whole.outputs[0].token_ids)
        text = llm.get_tokenizer().decode(whole.outputs[0].token_ids)
        assert 5 <= len(text.partition("</think>")[0].encode()) <= 5 * 6 and "</think>" in text


def test_a_form_that_begins_with_the_first_token_is_no_thinking(path, wanted):
    """As in completions: the prompt has begun it, but nothing can end it."""
    engine, (prompt, _) = make_engine(path, **ARGUMENTS), wanted[0][0]
    found = []
    for budget in (None, 2):
        params = SamplingParams(temperature=1, seed=4, max_tokens=40, thinking_token_budget=budget, **FORM)
        request = engine.add_request("a", prompt, params, None, engine.intake.limits(params))
        while engine.has_work:
            engine.step()
        found.append(outcome(request))
    assert found[0] == found[1] and found[0][0][2] == "stop"
    engine.close()
