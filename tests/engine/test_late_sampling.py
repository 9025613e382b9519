"""What is uploaded for the sampling of a step while its layers run may depend on the token just read."""

from collections import Counter

import pytest
from engines import SMALL, assert_pools_as_before, make_engine, outcome, random_prompts, read_at_once, run
from late_mask import MASK_RULE, LateMask
from prefill_graphs import WarmUpRuntime
from request_helpers import Script, play
from simulated import RaceError, SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams

PROMPTS = random_prompts(2, 70, 90, seed=32) + random_prompts(4, 5, 35, seed=31)
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=9 + i, ignore_eos=True, logprobs=[None, 0, 2][i % 3])
    for i in range(6)
]
ENDS = (1, 2, 4)  # the requests that end with the token just read: the host cannot know it before
ARRIVALS = {0: [0, 1], 5: [2], 7: [3], 9: [4], 10: [5]}
ARGUMENTS = dict(max_num_batched_tokens=48, max_model_len=128, capture_num_tokens=[4, 24, 40])
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True, num_ring_slots=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def wanted(path):
    """Parameters and outcome of each request: alone, one step at a time, each read before the next is planned."""
    engine = read_at_once(make_engine(path, enforce_eager=True, **ARGUMENTS))
    LateMask(engine, is_late=False)
    found = []
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        if number in ENDS:
            ((tokens, *_),) = run(engine, [prompt], [params])[0]
            params = SamplingParams(**vars(params) | dict(stop_token_ids=[tokens[5]]))
        found.append((params, run(engine, [prompt], [params])[0]))
    engine.on_logits = None
    assert run(engine, PROMPTS, PARAMS) != [outcome for _, outcome in found], "the mask changes nothing"
    return found


def played(engine, wanted):
    pairs = [(prompt, params) for prompt, (params, _) in zip(PROMPTS, wanted, strict=True)]
    found = play(engine, Script({step: [pairs[i] for i in numbers] for step, numbers in ARRIVALS.items()}))
    assert_pools_as_before(engine)
    return found


def kinds(batches):
    return Counter({int: "decode", list: "prefill", tuple: "mixed"}[type(batch)] for batch in batches)


@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("resident-0", "resident, eager-None", "offload-2", "offload, eager-3")
def test_a_mask_that_depends_on_the_last_token_gives_what_a_request_gets_alone(path, wanted, variant, seed):
    engine = make_engine(path, WarmUpRuntime(seed=seed), **ARGUMENTS | VARIANTS[variant])
    mask = LateMask(engine)
    found = played(engine, wanted)
    assert found.outcomes == [outcome for _, outcome in wanted]
    found = kinds(found.batches)
    assert min(found["prefill"], found["mixed"], found["decode"]) > 2, found
    assert mask.num_banned["ended"] >= len(ENDS), "a row that ends with the token just read is sampled, and dropped"
    assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in variant)
    assert seed is None or mask.num_ahead > found.total() // 2, "the host waited for the layers"


@pytest.mark.parametrize("rule", ["host.read_after_step", MASK_RULE])
@pytest.mark.parametrize("variant", ["resident", "offload"])
def test_each_wait_removed_is_noticed(path, wanted, variant, rule):
    for seed in range(100):
        engine = make_engine(path, SimulatedRuntime(seed, rule), **ARGUMENTS | VARIANTS[variant])
        LateMask(engine)
        try:
            if played(engine, wanted).outcomes != [outcome for _, outcome in wanted]:
                return
        except (RaceError, AssertionError, IndexError, ValueError, OverflowError):
            return
    pytest.fail(f"100 seeds ran without {rule!r} and nothing went wrong")


def test_before_the_step_before_was_read_the_mask_is_another_one(path, wanted):
    engine = make_engine(path, **ARGUMENTS)
    LateMask(engine, is_late=False)
    assert played(engine, wanted).outcomes != [outcome for _, outcome in wanted]


@pytest.mark.parametrize("mode", ["resident", "offload"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.sampled("RuntimeError-resident", "KeyboardInterrupt-offload")
def test_an_error_between_layers_and_sampling_ends_the_requests_of_that_step_only(path, wanted, mode, error, fuzz):
    """Those of the step before have their token, also where they are in no later step yet."""
    num_spared = 0
    for at_call in range(1, 16) if fuzz else (5, 9):
        engine = make_engine(path, **ARGUMENTS | VARIANTS[mode] | dict(capture_num_tokens=[]))  # no mixed steps
        LateMask(engine)
        calls, on_logits, schedule, batches = [], engine.on_logits, engine.scheduler.schedule, []

        def broken(sequences, logits, calls=calls, on_logits=on_logits, at_call=at_call):
            calls.append({sequence.request_id for sequence in sequences if sequence.finish_reason is None})
            if len(calls) == at_call:
                raise error("out of luck")
            on_logits(sequences, logits)

        engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]
        engine.on_logits, requests = broken, []
        for prompt, (params, _) in zip(PROMPTS, wanted, strict=True):
            requests.append(engine.add_request(str(len(requests)), prompt, params))
        with pytest.raises(error, match="out of luck"):
            while engine.has_work:
                engine.step()
        failed = {sequence.request_id for sequence in batches[-1].sequences}
        before = [sequence for batch in batches[-2:-1] for sequence in batch.sampled]  # none where the first step fails
        num_spared += not {sequence.request_id for sequence in before if sequence.finish_reason is None} <= failed
        while engine.has_work:
            engine.step()
        aborted = {request.request_id for request in requests if outcome(request)[0][2] == "abort"}
        assert calls[at_call - 1] <= aborted <= failed and aborted
        for request, (_, expected) in zip(requests, wanted, strict=True):
            ((tokens, _, _),) = outcome(request)
            if request.request_id in aborted:
                assert tokens == expected[0][0][: len(tokens)]
            else:
                assert outcome(request) == expected
        assert_pools_as_before(engine)
        engine.on_logits = on_logits
        assert played(engine, wanted).outcomes == [outcome for _, outcome in wanted], "as if nothing had happened"
    assert num_spared > 0
