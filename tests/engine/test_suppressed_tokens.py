"""suppress_tokens of generation_config.json: these tokens never come, whatever a request asks for."""

import json

import pytest
from engines import make_engine, outcome, random_prompts, run
from gguf_models import write_gguf
from structured import make_structured_checkpoint
from tiny_models import make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams, StructuredOutputsParams
from nanoinfer.common.errors import RequestError
from nanoinfer.weights.generation_config import suppressed_token_ids
from nanoinfer.weights.load import read_checkpoint

PROMPTS = random_prompts(3, 5, 40)
GREEDY = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 3


def suppress(path, token_ids):
    (path / "generation_config.json").write_text(json.dumps(dict(suppress_tokens=token_ids)))
    return path


def tokens_of(outcomes):
    return [one[0][0] for one in outcomes]


@pytest.mark.parametrize("mode", [{}, dict(enable_cpu_offload=True)], ids=str)
def test_greedy_tokens_are_those_of_transformers_without_them(mode, tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    usual = {token for tokens in tokens_of(run(make_engine(path, **mode), PROMPTS, GREEDY)) for token in tokens}
    suppress(path, sorted(usual)[::2])
    found = tokens_of(run(make_engine(path, **mode), PROMPTS, GREEDY))
    assert usual.difference(*found) >= set(sorted(usual)[::2]) and found == reference_tokens(path, PROMPTS, 12)


def test_no_request_can_ask_for_them(tmp_path):
    engine = make_engine(suppress(make_checkpoint("qwen3", tmp_path), [7, 9, 4000]))
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=30, logit_bias={7: 100.0, 8: 100.0}, ignore_eos=True)
    (tokens,) = tokens_of(run(engine, PROMPTS[:1], [params]))
    assert set(tokens) == {8}
    with pytest.raises(RequestError, match="the checkpoint's suppress_tokens leave no token to begin with"):
        engine.add_request("none", PROMPTS[0], SamplingParams(allowed_token_ids=[7, 9]))
    assert set(tokens_of(run(engine, PROMPTS[:1], [SamplingParams(allowed_token_ids=[7, 5], max_tokens=4)]))[0]) == {5}


def test_a_grammar_that_takes_nothing_else_ends_its_request_by_name(tmp_path):
    path, options = make_structured_checkpoint(tmp_path), dict(max_model_len=128, skip_tokenizer_init=False)
    tokenizer = make_engine(path, **options).tokenizer
    own = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).startswith("a")]
    engine = make_engine(suppress(path, own), **options)

    def answer(regex):
        asked = StructuredOutputsParams(regex=regex)
        request = engine.add_request(regex, PROMPTS[0], SamplingParams(max_tokens=8, structured_outputs=asked))
        while not request.is_finished:
            engine.step()
        return request

    failed = answer("a+b")
    assert outcome(failed)[0][2] == "error" and "suppress_tokens (generation_config.json) forbids" in failed.error
    assert set(outcome(answer("[ab]{4}"))[0][0]).isdisjoint(own)


@pytest.mark.parametrize("content, wanted", [(None, ()), ([5, 3, 5], (3, 5)), (4, (4,)), ([], ())])
def test_what_the_file_says(content, wanted, tmp_path):
    assert suppressed_token_ids(read_checkpoint(suppress(make_checkpoint("llama", tmp_path), content))) == wanted


def test_what_is_no_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match="generation_config.json: suppress_tokens is 'x', it must be a token id"):
        make_engine(suppress(make_checkpoint("llama", tmp_path), "x"))


def test_a_gguf_file_says_it_in_its_metadata(tmp_path):
    path = make_checkpoint("llama", tmp_path / "hf")
    for ids, wanted in (([9, 4], (4, 9)), (None, ())):
        extra = {"tokenizer.ggml.suppress_tokens": ids}
        file = write_gguf("llama", path, tmp_path / "model.gguf", **extra)
        assert suppressed_token_ids(read_checkpoint(file)) == wanted
