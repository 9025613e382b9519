"""A completion that fails: it always has a last output, with the error, and what others hold does not depend on it."""

import pytest
from engines import assert_pools_as_before, make_engine, outcome, random_prompts
from structured import make_structured_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.request import Request

ARGUMENTS = dict(
    max_num_batched_tokens=48, max_model_len=128, capture_num_tokens=[4, 24, 40], skip_tokenizer_init=False
)
PROMPTS = random_prompts(3, 5, 30, seed=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path):
    return make_engine(path, **ARGUMENTS)


def break_flush(monkeypatch, is_bad) -> None:
    """The text that is held back cannot be read."""
    flush = Detokenizer.flush

    def broken(detokenizer):
        if any(sequence.detokenizer is detokenizer for sequence in is_bad().sequences):
            raise KeyError("no such piece")
        return flush(detokenizer)

    monkeypatch.setattr(Detokenizer, "flush", broken)


def break_metrics(monkeypatch, is_bad) -> None:
    metrics = Request.metrics

    def broken(request):
        if request is is_bad():
            raise KeyError("no such piece")
        return metrics(request)

    monkeypatch.setattr(Request, "metrics", broken)


def break_output(monkeypatch, is_bad) -> None:
    """The last output cannot be made at all, not even for an error."""
    stream_output = Request.stream_output

    def broken(request, sequence, **arguments):
        if request is is_bad() and sequence.finish_reason is not None:
            raise KeyError("no such piece")
        return stream_output(request, sequence, **arguments)

    monkeypatch.setattr(Request, "stream_output", broken)


BROKEN = {"flush": break_flush, "metrics": break_metrics, "output": break_output}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("ends_by", ["max_tokens", "stop token"])
def test_what_fails_at_the_last_token_is_told(engine, monkeypatch, what, ends_by):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    if ends_by == "stop token":
        request = engine.add_request("first", PROMPTS[0], params)
        while engine.has_work:
            engine.step()
        params.stop_token_ids = request.sequences[0].output_token_ids[3:4]
    requests = {name: engine.add_request(name, PROMPTS[0], params) for name in ("good", "bad")}
    BROKEN[what](monkeypatch, lambda: requests["bad"])
    outputs = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    last = outputs["bad"][-1]
    assert last.finished and last.finish_reason == "error" and last.error == "'no such piece'"
    assert [output.finished for output in outputs["bad"][:-1]] == [False] * (len(outputs["bad"]) - 1)
    assert requests["bad"].error == "'no such piece'"
    assert outputs["good"][-1].finish_reason == ("length" if ends_by == "max_tokens" else "stop")
    assert_pools_as_before(engine)


@pytest.mark.parametrize("what", BROKEN)
def test_generate_warns_of_what_fails_at_the_last_token(path, monkeypatch, what):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(path, device="cpu", dtype="float32", block_size=16, progress_bar=False, **ARGUMENTS) as llm:
        bad, add = [], llm.engine.add_request

        def noted(*arguments):
            bad.append(add(*arguments))
            return bad[-1]

        llm.engine.add_request = noted
        BROKEN[what](monkeypatch, lambda: bad[0])
        with pytest.warns(UserWarning, match="prompt 0 of 2 failed: 'no such piece'") as warned:
            failed, other = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert warned[0].filename == __file__  # where `generate` was called
    assert failed.error == "'no such piece'" and failed.outputs[0].finish_reason == "error"
    assert other.error is None and other.outputs[0].finish_reason == "length"


def held(engine, prompts_beside: list[list[int]]) -> tuple[list, str]:
    """What the completions hold of a form whose "e" leads to nothing but what is forbidden."""
    for number, prompt in enumerate(prompts_beside):
        engine.add_request(f"beside {number}", prompt, SamplingParams(seed=number, max_tokens=9, ignore_eos=True))
    form = dict(structured_outputs=dict(regex="[ab]{1,6}(c|ed)"), bad_words=["d"])
    request = engine.add_request("failing", PROMPTS[2], SamplingParams(n=6, seed=1, max_tokens=20, **form))
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)
    return outcome(request), request.error


def test_what_completions_hold_beside_one_that_fails_is_the_same_alone_and_in_a_crowd(engine):
    """Few of eight rows are left for six completions, so that some begin when others have ended."""
    alone = held(engine, [])
    reasons = [reason for _, _, reason in alone[0]]
    assert {"error", "stop"} == set(reasons), "some fail, and some do not"
    assert len({len(tokens) for tokens, _, reason in alone[0] if reason == "error"}) > 1
    for num_beside in (5, 7):
        assert held(engine, random_prompts(num_beside, 5, 9, seed=8)) == alone
