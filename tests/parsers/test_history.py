"""Earlier calls and their results, as the chat templates of models want them."""

import pytest
from written_calls import LLAMA3, TEMPLATES

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat


def form_of(name):
    return AnswerFormat.of(LLAMA3 if name == "llama3" else (TEMPLATES / f"{name}.jinja").read_text())


def call(number, name, arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


SAID = [
    {"role": "user", "content": "Q"},
    {
        "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
        "tool_calls": [call(1, "f", '{"a": 1}'), call(2, "g", None)],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
]  # fmt: skip


def test_arguments_are_objects_and_results_have_the_name_of_their_tool():
    _, called, two, one = form_of("Qwen-Qwen3-0.6B").messages(SAID)
    assert [one["function"] for one in called["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}
    ]  # fmt: skip
    assert called["reasoning_content"] == "Hm." and called["content"] == "I look."
    assert (two["name"], one["name"]) == ("g", "f")
    assert SAID[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "the caller's messages were changed"


def test_ids_for_mistral_have_nine_letters_and_digits_and_belong_together():
    _, called, two, one = form_of("Mistral-Small-3.2-24B-Instruct-2506").messages(SAID)
    ids = [one["id"] for one in called["tool_calls"]]
    assert [len(name) for name in ids] == [9, 9] and all(name.isalnum() for name in ids)
    assert [one["tool_call_id"], two["tool_call_id"]] == ids and len(set(ids)) == 2


@pytest.mark.parametrize("name", ["llama3", "openai-gpt-oss-120b"])
def test_several_calls_become_messages_before_their_results_where_a_template_takes_one(name):
    found = form_of(name).messages(SAID)
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [one["tool_calls"][0]["function"]["name"] for one in found[1::2]] == ["f", "g"]
    assert [one["content"] for one in found[2::2]] == ["one", "two"]
    if name != "llama3":  # either is before a call, text or what was thought
        assert (found[1]["content"], found[1]["thinking"]) == ("", "Hm.\nI look.")


def test_arguments_that_are_no_object_stay_and_calls_that_are_none_are_refused():
    broken = [{"role": "assistant", "content": "", "tool_calls": [call(1, "f", '{"a": ')]}]
    assert form_of("Qwen-Qwen3-0.6B").messages(broken)[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    for calls in ([{"function": {"name": ""}}], [call(1, "f", 3)], "f", [None]):
        with pytest.raises(RequestError, match=r"messages\[0\].tool_calls.* is .*: give"):
            form_of("Qwen-Qwen3-0.6B").messages([{"role": "assistant", "content": "", "tool_calls": calls}])
