"""Answers of a random model to each schema of the JSON Schema Test Suite that is taken."""

import json
from collections import Counter

import pytest
from engines import make_engine, outcome, random_prompts
from json_schema_suite import cases_of_files, is_valid
from simulated import SimulatedRuntime
from structured import make_structured_checkpoint

from nanoinfer import SamplingParams, StructuredOutputsParams

TAKEN = [case for cases in cases_of_files().values() for case in cases if case.refusal is None]
NUM_SHARES = 12
ARGUMENTS = dict(max_num_batched_tokens=48, max_model_len=128, skip_tokenizer_init=False)
MODES = {"resident": {}, "offload": dict(enable_cpu_offload=True)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.sampled("0")
def test_finished_answers_are_valid_and_both_modes_give_the_same_bits(path, share):
    cases, found = TAKEN[share::NUM_SHARES], {}
    prompts = random_prompts(len(cases), 3, 40, seed=share)
    for mode, arguments in MODES.items():
        engine, requests = make_engine(path, SimulatedRuntime(share), **ARGUMENTS | arguments), []
        for number, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
            form = StructuredOutputsParams(json=case.schema, disable_any_whitespace=True)
            params = SamplingParams(temperature=1, seed=number, max_tokens=60, logprobs=0, structured_outputs=form)
            requests.append(engine.add_request(case.name, prompt, params))
        while engine.has_work:
            engine.step()
        found[mode] = [outcome(request)[0] for request in requests]
        engine.close()
    assert found["offload"] == found["resident"]
    reasons = Counter()
    for case, (tokens, _, reason) in zip(cases, found["resident"], strict=True):
        text = engine.tokenizer.decode(tokens, skip_special_tokens=True)
        reasons[reason] += 1
        assert reason != "stop" or is_valid(text, case.schema), (case.name, text, json.dumps(case.schema))
    assert reasons["stop"] > len(cases) // 3 and reasons.keys() <= {"stop", "length"}, reasons
