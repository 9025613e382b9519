"""What a step samples is read while the next one runs, log-probabilities too."""

import pytest
from engines import SMALL, assert_pools_as_before, make_engine, outcome, random_prompts, read_at_once, run
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams

PROMPTS = random_prompts(5, 3, 60, seed=5)
NUM_LOGPROBS = [20, None, 0, 3, None]
MODES = {"resident": {}, "offload": dict(enable_cpu_offload=True)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def params(i, num_logprobs=NUM_LOGPROBS):
    return SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, logprobs=num_logprobs[i])


def play(engine, num_logprobs=NUM_LOGPROBS):
    """Outcomes, and after which steps one was in flight. The requests come and end one after the other."""
    requests, in_flight = [], []
    while len(requests) < len(PROMPTS) or engine.has_work:
        if len(in_flight) % 3 == 0 and len(requests) < len(PROMPTS):
            i = len(requests)
            requests.append(engine.add_request(str(i), PROMPTS[i], params(i, num_logprobs)))
        engine.step()
        in_flight.append(engine.live.in_flight is not None)
    assert_pools_as_before(engine)
    return [outcome(request) for request in requests], in_flight


@pytest.fixture(scope="module")
def wanted(path):
    """What each gets alone from an engine that reads each step before it plans the next one."""
    engine = read_at_once(make_engine(path))
    return [run(engine, [prompt], [params(i)])[0] for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_leave_as_many_steps_in_flight_and_are_those_of_a_request_alone(path, wanted, mode):
    found, in_flight = play(make_engine(path, **MODES[mode]))
    without, in_flight_without = play(make_engine(path, **MODES[mode]), [None] * len(PROMPTS))
    assert in_flight == in_flight_without and sum(in_flight) > 20
    assert found == wanted
    assert [[tokens for tokens, _, _ in each] for each in found] == [[tokens for tokens, _, _ in c] for c in without]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("resident-0", "offload-1")
def test_log_probabilities_are_the_same_in_any_order_of_the_streams(path, wanted, mode, seed):
    """The copies of the next step may run before the host reads."""
    assert play(make_engine(path, SimulatedRuntime(seed), **MODES[mode]))[0] == wanted


def test_which_rows_want_log_probabilities_is_uploaded_again_when_work_was_lost(path, wanted):
    """What the host enqueues behind work that fails never runs."""
    engine = make_engine(path, SimulatedRuntime(0), max_num_batched_tokens=64)  # one prefill step for both

    def fail():
        raise RuntimeError("out of luck")

    def outcomes():  # the second one's place is not where an empty table points
        return run(engine, [PROMPTS[i] for i in (4, 2)], [params(i) for i in (4, 2)])

    engine.on_logits = lambda sequences, logits: engine.runner.compute.run(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        outcomes()
    engine.on_logits = None
    while engine.has_work:
        engine.step()
    assert outcomes() == [wanted[4], wanted[2]]
    assert_pools_as_before(engine)
