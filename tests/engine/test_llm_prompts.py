"""Text and conversations in vLLM's forms, and what of them is refused."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engines import COMMON, VOCAB, assert_pools_as_before
from serving import make_served_checkpoint
from tqdm import tqdm
from transformers import AutoTokenizer

from nanoinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_served_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False))) as llm:
        yield llm


def test_text_may_come_in_a_dict(llm):
    outputs = llm.generate(["w20 w21", {"prompt": "w20 w21"}], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["w20 w21"] * 2
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text
    (output,) = llm.generate({"prompt": "w20 w21", "prompt_token_ids": None}, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [20, 21]


def test_the_tokenizer_is_there_for_prompts_that_come_as_ids(llm):
    assert llm.get_tokenizer().encode("w20 w21") == [20, 21]


def test_a_list_of_numpy_integers_is_one_of_token_ids(llm):
    outputs = llm.generate(list(np.array([20, 21])), GREEDY, use_tqdm=False)
    outputs += llm.generate([[np.int32(20), 21], [20, np.int64(21)]], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[20, 21]] * 3
    assert all(type(token_id) is int for output in outputs for token_id in output.prompt_token_ids)


def test_text_that_the_tokenizer_cannot_read_fails_alone(llm):
    prompts = ["w20", "\ud800", {"prompt": "\ud800"}]
    with pytest.raises(ValueError, match="prompt 1 of 3: the tokenizer cannot read the prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    last = [output for output in llm.generate_stream(prompts, GREEDY) if output.finished]
    assert sorted(output.finish_reason for output in last) == ["error", "error", "length"]
    assert_pools_as_before(llm.engine)


@pytest.mark.parametrize(
    "messages, message",
    [
        ("hi", "messages is 'hi': give a list of {'role': ..., 'content': ...}"),
        ({"role": "user", "content": "w1"}, "messages is {'role': 'user'"),
        (None, "messages is None"),
        ([], "messages is empty"),
        ([[]], "messages is empty"),
        (["w1"], "messages[0] has no role"),
        ([{"content": "w1"}], "messages[0] has no role"),
        ([{"role": "user"}], "messages[0].content is None: give text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content has a part of type 'image_url'"),
        ([{"role": "user", "content": [{"typ": "text"}]}], "messages[0].content has a part that is no"),
        ([{"role": "nobody", "content": "w1"}], "the chat template refuses the messages: no such role"),
        ([{"role": "user", "content": "\ud800"}], "the tokenizer cannot read the prompt"),
    ],
)
def test_a_conversation_of_the_wrong_kind_is_refused(llm, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_assistants_null_content_and_text_parts_are_text(llm):
    user = {"role": "user", "content": [{"type": "text", "text": "w31"}, {"type": "text", "text": "w32"}]}
    conversations = [[user, {"role": "assistant", "content": None}], [user, {"role": "assistant", "content": ""}]]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[7, 31, 32, 8, 9]] * 2


def test_a_conversation_may_set_variables_of_the_template_and_no_parameters(llm):
    user = [{"role": "user", "content": "w31"}]
    (loud,) = llm.chat(user, GREEDY, use_tqdm=False, chat_template_kwargs={"loud": True})
    (plain,) = llm.chat(user, GREEDY, use_tqdm=False, chat_template_kwargs={})
    assert (loud.prompt_token_ids, plain.prompt_token_ids) == ([7, 31, 10, 9], [7, 31, 9])
    for wrong, message in (
        ({"tokenize": False}, "chat_template_kwargs may not set 'tokenize'"),
        ({"add_generation_prompt": False}, "chat_template_kwargs may not set 'add_generation_prompt'"),
        ({7: 1}, "chat_template_kwargs may not set 7"),
        (["loud"], "chat_template_kwargs is ['loud']: give a dict"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.chat(user, GREEDY, use_tqdm=False, chat_template_kwargs=wrong)


@pytest.mark.parametrize("bar", [partial(tqdm, leave=False), None])
def test_use_tqdm_may_make_the_progress_bar(llm, bar):
    """As in vLLM: such as functools.partial(tqdm, leave=False), or anything that has `update` and `close`."""
    made, advanced = [], []

    class Bar:
        def update(self, number):
            advanced.append(number)

        def close(self):
            advanced.append("closed")

    def make(**arguments):
        made.append(arguments["total"])
        return Bar() if bar is None else bar(**arguments)

    llm.generate([[20], [21, 22]], GREEDY, use_tqdm=make)
    llm.chat([{"role": "user", "content": "w31"}], GREEDY, use_tqdm=make)
    assert made == [2, 1]
    assert bar is not None or advanced == [1, 1, "closed", 1, "closed"]


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(tmp_path):
    """A tokenizer all of whose tokens are special."""
    path = make_served_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"w{i}" for i in range(VOCAB)]})
    tokenizer.save_pretrained(path)
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False))) as llm:
        params = [replace(GREEDY, skip_special_tokens=skip) for skip in (True, False)]
        skipped, shown = (output.outputs[0] for output in llm.generate([[20, 21]] * 2, params, use_tqdm=False))
    assert skipped.token_ids == shown.token_ids and skipped.text == ""
    assert shown.text.split() == [f"w{token_id}" for token_id in shown.token_ids]


def test_the_text_may_end_with_what_ended_it(llm):
    drawn = SamplingParams(seed=5, max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate("w20 w21", drawn, use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    word = text.split()[3]
    assert ids[3] not in ids[:3] and word not in text.split()[:3]
    end = text.index(word)
    for stop, reason in ((dict(stop=word), word), (dict(stop_token_ids=[ids[3]]), ids[3])):
        cut = replace(drawn, **stop)
        kept = replace(cut, include_stop_str_in_output=True)
        without, ended = (llm.generate("w20 w21", one, use_tqdm=False)[0].outputs[0] for one in (cut, kept))
        assert without.text.strip() == text[:end].strip() and ended.text == text[: end + len(word)]
        assert ended.stop_reason == reason == without.stop_reason
        assert "".join(one.text_delta for one in llm.generate_stream("w20 w21", kept)) == ended.text


def test_tokens_may_stay_tokens(llm):
    params = replace(GREEDY, detokenize=False)
    outputs = llm.generate(["w20 w21"] * 2, [params, GREEDY], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert not outputs[0].outputs[0].text and outputs[1].outputs[0].text


def test_requests_keep_the_parameters_that_they_were_given(llm):
    params = replace(GREEDY, max_tokens=6)
    stream = llm.generate_stream("w20 w21", params)
    first = next(stream)
    params.max_tokens, params.stop = 2, ["w"]
    assert len(first.token_ids_delta) + sum(len(one.token_ids_delta) for one in stream) == 6


def test_a_conversation_may_go_on_with_its_last_message_and_have_another_template(llm):
    messages = [{"role": "user", "content": "w31"}, {"role": "assistant", "content": "w32"}]
    goes_on = dict(add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    (output,) = llm.chat(messages, GREEDY, **goes_on)
    assert output.prompt_token_ids[-1] == 32
    template = "{% for m in messages %}{{ m['content'] }} w40 {% endfor %}"
    (other,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert other.prompt_token_ids == [31, 40, 32, 40]
    reads_thoughts = "{% for m in messages %}{{ m.reasoning_content }} {{ m.content }} {% endfor %}"
    messages[1]["reasoning_content"] = "w33"
    (other,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=reads_thoughts)
    assert other.prompt_token_ids == [31, 33, 32], "the form of a history is that of the template that was given"
    with pytest.raises(ValueError, match="set add_generation_prompt=False"):
        llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True)


def test_vllms_names_are_there_or_say_what_to_do(llm):
    assert llm.llm_engine is llm.engine
    with pytest.raises(
        AttributeError, match=re.escape("LLM.sleep of vLLM is not there: close() gives all memory back")
    ):
        llm.sleep()
    with pytest.raises(AttributeError, match=re.escape("LLM has no generat (did you mean 'generate'?)")):
        llm.generat  # noqa: B018
    assert not hasattr(llm, "beam_search")
