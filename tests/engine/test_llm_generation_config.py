"""generation_config.json: what it says is the default of requests that leave it out, in LLM and in the server."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from engines import COMMON
from request_helpers import shrink_gpu_pool
from serving import make_served_checkpoint, serving
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.weights.generation_config import end_token_ids
from nanoinfer.weights.load import read_checkpoint

RECOMMENDED = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def write(path, **content):
    (path / "generation_config.json").write_text(json.dumps(content))


def make_llm(path, **arguments):
    return LLM(path, **(COMMON | arguments))


@pytest.mark.parametrize(
    "content, wanted",
    [
        (RECOMMENDED, RECOMMENDED),
        (dict(do_sample=False, temperature=0.7), dict(temperature=0.7)),
        (dict(temperature=None, top_k=50, typical_p=0.3, eos_token_id=[2, 3]), dict(top_k=50)),
        (dict(max_new_tokens=40), dict(max_tokens=40)),
        (dict(), dict()),
    ],
)
def test_the_defaults_are_the_checkpoints(path, content, wanted):
    write(path, **content)
    with make_llm(path) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**wanted)
    with make_llm(path, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    "content, wanted",
    [
        (None, {2}),
        (dict(temperature=0.5), {2}),
        (dict(eos_token_id=5), {5}),
        (dict(eos_token_id=[5, 6]), {5, 6}),
        (dict(eos_token_id=[]), set()),
        (dict(eos_token_id=None), set()),
    ],
)
def test_tokens_that_end_a_completion_are_the_generation_configs_if_it_speaks_of_them(path, content, wanted):
    (path / "generation_config.json").unlink(missing_ok=True)
    if content is not None:
        write(path, **content)
    checkpoint = read_checkpoint(path)
    assert checkpoint.hf_config.eos_token_id == 2 and end_token_ids(checkpoint) == wanted
    checkpoint.hf_config.eos_token_id = None
    assert end_token_ids(checkpoint) == (wanted if content and "eos_token_id" in content else set())


def test_null_as_end_token_means_none_as_in_transformers(path):
    for content, ends in ((dict(eos_token_id=None), False), (dict(eos_token_id=list(range(160))), True)):
        write(path, **content)
        with make_llm(path) as llm:
            (found,) = llm.generate([20, 21], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        model = AutoModelForCausalLM.from_pretrained(path)
        wanted = model.generate(torch.tensor([[20, 21]]), do_sample=False, max_new_tokens=9, pad_token_id=0)
        assert found.outputs[0].token_ids == wanted[0, 2:].tolist()
        assert len(found.outputs[0].token_ids) == (1 if ends else 9)


def test_generate_without_params_takes_them_and_with_params_does_not(path):
    write(path, temperature=0.0, max_new_tokens=5)
    with make_llm(path) as llm:
        (wanted,) = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        (found,) = llm.generate([7, 8], use_tqdm=False)
        streamed = [output.token_ids_delta for output in llm.generate_stream([7, 8])]
        (sampled,) = llm.generate([7, 8], SamplingParams(max_tokens=5, seed=1), use_tqdm=False)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids == sum(streamed, [])
    assert sampled.outputs[0].token_ids != wanted.outputs[0].token_ids


def test_who_asks_for_as_many_tokens_as_the_checkpoint_recommends_is_not_cut_in_silence(path):
    """What nobody asked for is cut to what the pool holds; the same number, asked for, is refused."""
    write(path, max_new_tokens=150)
    with make_llm(path, max_model_len=200) as llm:
        shrink_gpu_pool(llm.engine, 8)
        (output,) = llm.generate([5] * 20, replace(llm.get_default_sampling_params(), ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8 * 16 - 20
        for params in (
            SamplingParams(max_tokens=150),
            replace(llm.get_default_sampling_params(), max_tokens=150),
        ):
            with pytest.raises(ValueError, match="may grow by 150, the KV cache holds 128: lower max_tokens"):
                llm.generate([5] * 20, params, use_tqdm=False)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"temperature": -1}', r"generation_config.json: temperature is -1, it must be .* generation_config=\"vllm\""),
        ('{"top_k": "many"}', "generation_config.json: top_k is 'many'"),
        ("[1]", "generation_config.json holds a list"),
        ("{", "generation_config.json is not readable as JSON"),
    ],
)
def test_a_value_that_cannot_be_used_names_the_file(path, content, message):
    (path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        make_llm(path)


def test_another_source_is_refused(path):
    with pytest.raises(ValueError, match="generation_config='vlm' is not one of auto, vllm"):
        make_llm(path, generation_config="vlm")


def test_the_server_takes_them_field_by_field(path):
    write(path, temperature=0.9, top_k=3, max_new_tokens=7)
    asked = dict(seed=4, ignore_eos=True, return_token_ids=True)
    chat = dict(messages=[{"role": "user", "content": "w31"}], **asked)

    async def ask(**arguments):
        async with serving(path, **arguments) as served:
            bodies = [
                ("/v1/completions", dict(prompt=[20, 21], **asked)),
                ("/v1/completions", dict(prompt=[20, 21], temperature=0.9, top_k=3, **asked)),
                ("/v1/completions", dict(prompt=[20, 21], temperature=None, top_k=0, **asked)),
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions", chat | dict(max_tokens=9)),
            ]
            answers = [(await served.post(url, **body)).json() for url, body in bodies]
            return [answer["choices"][0]["token_ids"] for answer in answers]

    left_out, explicit, all_tokens, conversation, limited = asyncio.run(ask())
    assert left_out == explicit != all_tokens
    assert len(left_out) == 16 and len(conversation) == 7 and len(limited) == 9
    neutral = asyncio.run(ask(generation_config="vllm", max_model_len=64))
    assert neutral[0] != left_out and neutral[1] == explicit and len(neutral[3]) == 61


def test_the_packaged_model_recommends_nothing():
    with LLM("recall", device="cpu", max_model_len=512, progress_bar=False) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
