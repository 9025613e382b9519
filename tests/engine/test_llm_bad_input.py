"""Input of the wrong kind: refused by name before any work, and alone where other prompts are streamed."""

import re

import numpy as np
import pytest
import torch
from engines import COMMON, assert_pools_as_before, make_engine
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module", params=[False, True], ids=["resident", "offload"])
def llm(path, request):
    with LLM(path, **(COMMON | dict(enable_cpu_offload=request.param))) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompt, message",
    [
        (None, "the prompt is a NoneType: give text, a list of token ids, {"),
        ({"a": 1}, "the prompt is a dict with ['a']: give text"),
        (
            {"prompt": "w3", "multi_modal_data": {"image": 1}},
            "the prompt is a dict with ['prompt', 'multi_modal_data']",
        ),
        ({"prompt": None}, "the prompt is a dict with []"),
        ({"prompt": [3]}, "the prompt's text is [3]: give text"),
        ({"prompt_token_ids": "w3"}, "prompt_token_ids is 'w3': give a list of token ids"),
        ({"prompt_token_ids": [3, 999]}, "prompt token 999 is outside the vocabulary"),
        (np.array([3.5, 4]), "prompt token 3.5 is outside the vocabulary"),
        (np.array(3), "the prompt is a ndarray: give text"),
        (torch.tensor([[3, 4]]), "prompt token [3, 4] is outside the vocabulary"),
        ([3, True], "prompt token True is outside the vocabulary"),
        ([3, None], "prompt token None is outside the vocabulary"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_prompt_of_the_wrong_kind_fails_the_list_but_alone_in_a_stream(llm, prompt, message):
    good, before = [4, 5, 6], llm.stats()
    with pytest.raises(ValueError, match=re.escape(f"prompt 1 of 3: {message}")):
        llm.generate([good, prompt, good], GREEDY, use_tqdm=False)
    assert llm.stats() == before, "something ran, or is still queued"
    outputs = [output for output in llm.generate_stream([good, prompt, good], GREEDY) if output.finished]
    assert sorted(output.finish_reason for output in outputs) == ["error", "length", "length"]
    (error,) = (output.error for output in outputs if output.finish_reason == "error")
    assert error.startswith(message)
    assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("prompts", [None, 7, np.array(3), {3, 4}])
def test_prompts_that_are_no_list_are_refused(llm, prompts):
    message = f"prompts is a {type(prompts).__name__}: give text, a list of token ids, or a list of such"
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match=message):
        next(llm.generate_stream(prompts, GREEDY))


ONE = {
    "ids": [3, 4, 5],
    "tuple": (3, 4, 5),
    "range": range(3, 6),
    "array": np.array([3, 4, 5], dtype=np.int32),
    "tensor": torch.tensor([3, 4, 5]),
    "dict": {"prompt_token_ids": [3, 4, 5]},
    "dict of an array, with its text": {"prompt_token_ids": np.arange(3, 6), "prompt": "three to five"},
}


@pytest.mark.parametrize("prompt", ONE.values(), ids=ONE)
def test_a_prompt_may_come_in_each_of_vllms_forms(llm, prompt):
    wanted = llm.generate([ONE["ids"]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for prompts in (prompt, [prompt], [prompt, prompt]):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[3, 4, 5]] * (2 if len(outputs) == 2 else 1)
        assert all(output.outputs[0].token_ids == wanted for output in outputs)
    streamed = [token_id for output in llm.generate_stream(prompt, GREEDY) for token_id in output.token_ids_delta]
    assert streamed == wanted


def test_rows_of_an_array_are_prompts(llm):
    outputs = llm.generate(np.array([[3, 4], [5, 6]]), GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[3, 4], [5, 6]]


def test_without_max_tokens_a_completion_uses_what_model_length_and_pool_leave(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([5] * 380, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == llm.engine.plan.max_model_len - 380
    llm.engine.modes.max_sequence_tokens = lambda mode: 32
    try:
        (output,) = llm.generate([5] * 20, params, use_tqdm=False)
        with pytest.raises(ValueError, match="KV cache holds 32"):
            llm.generate([5] * 32, params, use_tqdm=False)
    finally:
        del llm.engine.modes.max_sequence_tokens
    assert len(output.outputs[0].token_ids) == 12
    assert_pools_as_before(llm.engine)


def test_more_tokens_than_the_model_length_leaves_are_cut_to_that_as_in_vllm(llm):
    params = SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True)
    (output,) = llm.generate([5] * 380, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == llm.engine.plan.max_model_len - 380
    assert output.outputs[0].finish_reason == "length"


def test_a_negative_seed_is_one_of_its_own(llm):
    def drawn(seed):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
        return llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids

    assert drawn(-5) == drawn(-5) == drawn(2**64 - 5) != drawn(5)


@pytest.mark.parametrize("prompt", [[1.5], [np.float64(3)], [float("nan"), 3]])
def test_one_prompt_whose_tokens_are_no_whole_numbers_is_refused(llm, prompt):
    with pytest.raises(ValueError, match=re.escape(f"prompt token {prompt[0]!r} is outside the vocabulary")):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}])
def test_sampling_params_of_the_wrong_kind_are_refused(llm, params):
    message = f"sampling_params is a {type(params).__name__}: give SamplingParams(...) or a list of them"
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate([[3]], params)


@pytest.mark.parametrize("model", [None, 5, "", b"path"])
def test_a_model_that_is_no_path_is_refused(model):
    with pytest.raises(ValueError, match=re.escape(f"model={model!r} must be a checkpoint's directory or a hub id")):
        LLM(model, **COMMON)


@pytest.mark.parametrize("device", [None, 0, torch.device("cpu")])
def test_a_device_that_is_no_text_is_refused(path, device):
    with pytest.raises(ValueError, match=re.escape(f"device={device!r} must be text")):
        LLM(path, **(COMMON | dict(device=device)))


def test_stop_strings_without_a_tokenizer_are_refused_before_any_prompt_runs(llm):
    before = llm.stats()
    params = [GREEDY, SamplingParams(stop="end")]
    message = "prompt 1 of 2: stop=['end'] is text, but there is no tokenizer: give stop_token_ids"
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate([[3], [4]], params, use_tqdm=False)
    assert llm.stats() == before and not llm.engine.has_work
    assert_pools_as_before(llm.engine)


def test_a_completion_may_fill_the_model_length_and_a_prompt_may_not(llm):
    limit = llm.engine.plan.max_model_len
    (output,) = llm.generate([5] * (limit - 1), GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match=f"the prompt is too long: {limit} tokens, and max_model_len={limit}"):
        llm.generate([5] * limit, GREEDY)
    assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
@pytest.mark.parametrize("arguments", [dict(), dict(block_size=32, max_model_len=1000), dict(num_ring_slots=5)])
@pytest.mark.sampled("arguments0-False", "arguments1-True", "arguments2-True")
def test_one_mebibyte_below_the_smallest_limit_is_refused_with_the_same_number(path, enable_cpu_offload, arguments):
    arguments = dict(enable_cpu_offload=enable_cpu_offload, max_num_batched_tokens=512) | arguments
    with pytest.raises(ValueError) as error:
        make_engine(path, gpu_memory_limit=1000, **arguments)
    smallest = re.search(r'give at least "((\d+)MiB)"', str(error.value))
    with pytest.raises(ValueError, match=smallest[1]):
        make_engine(path, gpu_memory_limit=(int(smallest[2]) - 1) * 2**20 or 1, **arguments)
    make_engine(path, gpu_memory_limit=smallest[1], **arguments).close()


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(max_tokens=3), "generate takes max_tokens inside sampling parameters: llm.generate(prompts, SamplingPar"),
        (dict(n=2, temperature=0.5), "llm.generate(prompts, SamplingParams(n=2, temperature=0.5))"),
        (dict(max_new_tokens=3), "SamplingParams(max_tokens=3)"),
    ],
)
def test_a_sampling_parameter_outside_of_them_is_told_where_it_belongs(llm, given, message):
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=re.escape(message)):
            llm.generate([5, 6], **given)
    with pytest.raises(ValueError, match=re.escape(message.replace("generate", "chat").replace("prompts", "messages"))):
        llm.chat([{"role": "user", "content": "w5"}], **given)
    with pytest.raises(ValueError, match="generate got an unknown argument 'promts': did you mean 'prompts'"):
        llm.generate([5, 6], promts=3)
