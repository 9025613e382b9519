"""One conversation in the three APIs makes one prompt, whatever clients do with its messages."""

import copy
import itertools
import json

import pytest
from trained_tokenizers import make_tokenizer
from written_calls import TEMPLATES

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.serve.fields import Fields, checked
from nanoinfer.serve.messages_request import MessagesRequest
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.serve.responses_request import ResponsesRequest
from nanoinfer.serve.tool_use import ToolUse

NAMES = ("Qwen-Qwen3-0.6B", "Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b", "ByteDance-Seed-OSS")
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CALLS = [("call_1", {"at": "Uno"}), ("call_2", {"at": "Due"})]
RESULTS = [("call_1", "First."), ("call_2", "Second.")]
FUNCTION = {"description": "Looks.", "name": "look", "parameters": SCHEMA}


def prompt(name, kind, body):
    tokenizer = make_tokenizer("qwen")
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    template, fields = ChatTemplate(tokenizer, AnswerFormat.of_tokenizer(tokenizer)), Fields(refuses_unknown=True)
    asked = checked(kind, copy.deepcopy(body), fields)
    chat = asked if kind is ChatRequest else checked(ChatRequest, asked.chat(fields), fields)
    arguments = ToolUse.of(chat, template.form).template_arguments(chat, template.form)
    return template.encode(chat.conversation(), **arguments, tokenize=False)


def in_chat(results):
    calls = [
        {"id": one, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
        for one, arguments in CALLS
    ]
    return {
        "messages": [
            {"role": "system", "content": "Rules."}, {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": one, "content": text} for one, text in results),
            {"role": "system", "content": "Late."}, {"role": "user", "content": "And?"},
        ],
        "tools": [{"function": FUNCTION, "type": "function"}],
    }  # fmt: skip


def in_messages(results):
    calls = [{"type": "tool_use", "id": one, "name": "look", "input": arguments} for one, arguments in CALLS]
    said = [{"type": "tool_result", "tool_use_id": one, "content": text} for one, text in results]
    return {
        "system": "Rules.", "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "Where?"}, {"role": "assistant", "content": calls},
            {"role": "user", "content": said}, {"role": "system", "content": "Late."},
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA, "description": "Looks."}],
    }  # fmt: skip


def in_responses(results):
    calls = [
        {"type": "function_call", "call_id": one, "name": "look", "arguments": json.dumps(arguments)}
        for one, arguments in CALLS
    ]
    return {
        "instructions": "Rules.",
        "input": [
            {"role": "user", "content": "Where?"}, *calls,
            *({"type": "function_call_output", "call_id": one, "output": text} for one, text in results),
            {"role": "developer", "content": "Late."}, {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_results_in_any_order_and_tools_in_any_form_make_one_prompt(name):
    forms = {ChatRequest: in_chat, MessagesRequest: in_messages, ResponsesRequest: in_responses}
    found = {
        prompt(name, kind, form(results)) for kind, form in forms.items() for results in itertools.permutations(RESULTS)
    }
    (text,) = found
    said = [text.index(mark) for mark in ("Where?", "Uno", "Due", "First.", "Second.", "Late.", "And?")]
    if name != "openai-gpt-oss-120b":  # which has each call before its result
        assert said == sorted(said)
    assert "Rules." in text and "Looks." in text


def test_what_claude_code_sends_is_taken_where_a_template_wants_turns():
    """The user's text behind a result, and a message of the system's in the midst of the others."""
    body = in_messages(RESULTS)
    body["messages"][2]["content"].append({"type": "text", "text": "Interrupted."})
    text = prompt("Mistral-Small-3.2-24B-Instruct-2506", MessagesRequest, body)
    said = [text.index(mark) for mark in ("Second.", "Interrupted.", "Late.", "And?")]
    assert said == sorted(said) and text.endswith("[/TOOL_RESULTS]")
