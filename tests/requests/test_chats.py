"""Chats whose messages a template would leave out: an error names them, and nothing is tried twice."""

import logging

import pytest
from small_templates import SMALL
from trained_tokenizers import make_tokenizer
from written_calls import TEMPLATES

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.requests import chats
from nanoinfer.requests.chats import ChatTemplate

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
USER, ANSWER = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "R."}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer("qwen")
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


def template_of(tokenizer, name):
    text = SMALL.get(name) or (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(tokenizer, AnswerFormat.of(text), text)


LOST = {
    "calls": ("HuggingFaceTB-SmolLM3-3B", [USER, CALLED, RESULT], r"messages\[1\].tool_calls\[0\] \(of the role"),
    "second call": (
        "microsoft-Phi-3.5-mini-instruct", [USER, ANSWER, USER, CALLED], r"messages\[3\].tool_calls\[0\] \(of the role"
    ),
    "result": ("microsoft-Phi-3.5-mini-instruct", [USER, RESULT], r"messages\[1\] \(of the role 'tool'\)"),
    "unknown role": ("drops roles", [USER, {"role": "critic", "content": "No."}], r"messages\[1\] \(of the role"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_would_vanish_is_an_error_that_names_it(tokenizer, name):
    template, messages, where = LOST[name]
    for _ in range(2):
        with pytest.raises(RequestError, match=where + ".* would not be in the prompt") as error:
            template_of(tokenizer, template).encode(messages, tokenize=False)
    assert error.value.field == "messages"


TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]


def test_tools_that_would_vanish_are_an_error(tokenizer):
    said = "{{ messages[0].content }}"
    for text in (said, "{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + said):
        template = ChatTemplate(tokenizer, AnswerFormat.of(text), text)
        with pytest.raises(RequestError, match="the tools would not be in the prompt") as error:
            template.encode([USER], tools=TOOLS)
        assert error.value.field == "tools" and template.encode([USER])


def test_tools_that_a_client_shows_itself_are_not_shown_again(tokenizer):
    template = template_of(tokenizer, "tools by another name")
    own = {"xml_tools": [{"name": "mine"}]}
    text = template.encode([USER], own, tools=TOOLS, tokenize=False)
    assert "mine" in text and "look" not in text


@pytest.mark.parametrize("name", ["arguments as text", "calls or content"])
def test_arguments_that_a_template_reads_as_text_stay_as_they_were_given(tokenizer, name):
    template = template_of(tokenizer, name)
    for given, shown in (('{"at":"ü"}', '{"at":"ü"}'), ({"at": "ü"}, '{"at": "ü"}'), ("", "{}"), (None, "{}")):
        call = {**CALL, "function": {"name": "look", "arguments": given}}
        text = template.encode([USER, {**CALLED, "tool_calls": [call]}, RESULT], tokenize=False)
        assert f"<call>look {shown}</call>" in text


def test_empty_texts_are_no_message(tokenizer):
    template = template_of(tokenizer, "drops late system")
    empty = [{"role": role, "content": " "} for role in ("system", "developer", "user")]
    assert template.encode([*empty, USER, {"role": "system", "content": ""}, ANSWER, USER], tokenize=False)
    assert template.encode([USER, {"role": "critic", "content": ""}], tokenize=False)


def test_texts_beside_calls_that_a_template_has_no_place_for_are_named_once_in_the_log(tokenizer, caplog):
    chats.findings_of.cache_clear()
    template = template_of(tokenizer, "mistralai-Mistral-Nemo-Instruct-2407")
    messages = [USER, {**CALLED, "content": "I look."}, RESULT]
    with caplog.at_level(logging.WARNING):
        first, second = (template.encode(messages, tokenize=False) for _ in range(2))
    assert first == second and "I look." not in first
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("messages[1].content is left out: ")


def test_an_order_of_messages_is_tried_once_whatever_its_texts_and_ids(tokenizer, monkeypatch):
    chats.findings_of.cache_clear()
    texts = []
    render = chats.encode_chat
    monkeypatch.setattr(chats, "encode_chat", lambda *given, **how: texts.append(how) or render(*given, **how))
    template = template_of(tokenizer, "Qwen-Qwen3-0.6B")

    def num_rendered(number):
        texts.clear()
        call = {**CALL, "id": f"id{number}", "function": {"name": f"f{number}", "arguments": f'{{"a{number}": 1}}'}}
        result = {"role": "tool", "tool_call_id": f"id{number}", "content": f"{number}"}
        messages = [{"role": "user", "content": f"Q{number}?"}, {**CALLED, "tool_calls": [call]}, result]
        template.encode(messages if number < 9 else [*messages, USER], tokenize=False)
        return len(texts)

    assert num_rendered(0) > 10 and [num_rendered(number) for number in (1, 2, 9, 10)] == [1, 1, 2, 1]
