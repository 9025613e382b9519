"""Earlier calls and their results, as the chat templates of models want them."""

import itertools

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


def test_arguments_are_objects_and_results_have_the_name_of_their_tool_and_the_order_of_the_calls():
    _, called, one, two = form_of("Qwen-Qwen3-0.6B").messages(SAID)
    assert [one["function"] for one in called["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}
    ]  # fmt: skip
    assert called["reasoning_content"] == "Hm." and called["content"] == "I look."
    assert (two["name"], one["name"]) == ("g", "f")
    assert SAID[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "the caller's messages were changed"


def test_ids_for_mistral_have_nine_letters_and_digits_and_belong_together():
    _, called, one, two = form_of("Mistral-Small-3.2-24B-Instruct-2506").messages(SAID)
    ids = [one["id"] for one in called["tool_calls"]]
    assert [len(name) for name in ids] == [9, 9] and all(name.isalnum() for name in ids)
    assert [one["tool_call_id"], two["tool_call_id"]] == ids and len(set(ids)) == 2


@pytest.mark.parametrize("given", ["toolu_01XFDUDYJgAACzvnptvVer6z", "call_" + "0" * 24, "chatcmpl-tool-x", "a-b", ""])
def test_ids_of_other_servers_are_shortened_for_mistral_and_its_own_stay(given):
    form = form_of("Mistral-Small-3.2-24B-Instruct-2506")

    def ids(name):
        calls = [call(1, "f", "{}") | {"id": name}, call(2, "f", "{}") | {"id": f"{name}2"}]
        results = [{"role": "tool", "tool_call_id": one["id"], "content": one["id"]} for one in calls]
        _, called, *results = form.messages(
            [SAID[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        )
        assert [one["tool_call_id"] for one in results] == [one["id"] for one in called["tool_calls"]]
        return [one["id"] for one in called["tool_calls"]]

    short = ids(given)
    assert [len(one) for one in short] == [9, 9] and "".join(short).isalnum() and len(set(short)) == 2
    assert ids(given) == short != ids(f"{given}x"), "an id follows from the one that was given, and from it alone"
    assert ids("aB3dE6gH9")[0] == "aB3dE6gH9"


def test_permuted_results_are_the_same_and_doubled_missing_or_unknown_ids_keep_their_order():
    form = form_of("Qwen-Qwen3-0.6B")
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in (1, 2, 3)]
    asked = {"role": "assistant", "content": "", "tool_calls": [call(n, "f", "{}") for n in (1, 2, 3)]}

    def order(*given, calls=asked):
        found = form.messages([SAID[0], calls, *given, {"role": "user", "content": "r0"}])
        return [one["content"] for one in found[2:]]

    for permuted in itertools.permutations(results):
        assert order(*permuted) == ["r1", "r2", "r3", "r0"]
    one, two, three = results
    assert order(three, one) == ["r1", "r3", "r0"], "a call without a result"
    assert order(three, {"role": "user", "content": "."}, one) == ["r1", "r3", ".", "r0"]
    for odd in (three, {**three, "tool_call_id": "x"}, {"role": "tool", "content": "r4"}, {**three, "tool_call_id": 5}):
        assert order(three, odd, one) == ["r3", odd["content"], "r1", "r0"]
    twice = {**asked, "tool_calls": [*asked["tool_calls"], asked["tool_calls"][0]]}
    assert order(three, one, calls=twice) == ["r3", "r1", "r0"]
    halves = [{**asked, "tool_calls": asked["tool_calls"][part]} for part in (slice(1), slice(1, 3))]
    assert [message["content"] for message in form.messages([*halves, three, two, one])[2:]] == ["r1", "r2", "r3"]


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
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls is 5, and its role 'user': calls are the assist"):
        form_of("Qwen-Qwen3-0.6B").messages([{"role": "user", "content": "", "tool_calls": 5}])
