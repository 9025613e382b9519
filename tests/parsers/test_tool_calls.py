"""Calls as published templates write them are read as they were meant, in whatever pieces they come."""

import copy
import json
import random
from dataclasses import replace

import pytest
from trained_tokenizers import make_tokenizer
from written_calls import STYLES, TOOLS, Writer, message_of, parsed

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import Message


@pytest.fixture(scope="module", params=STYLES)
def writer(request):
    return Writer(STYLES[request.param])


def test_the_template_chooses_the_parser(writer):
    assert writer.form.tool_parser == writer.style.parser


def test_every_prefix_of_an_answer_gives_what_the_whole_gives(writer, fuzz):
    draw, num_calls = random.Random(7), 0
    tokenizer = make_tokenizer("qwen")
    while num_calls < (150 if fuzz else 3):
        message = message_of(draw, writer.style)
        prompt, text = writer.answer(message)
        whole = parsed(writer.form, prompt, [text])
        assert whole.content.strip() == message["content"] and not whole.reasoning
        assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
        ]
        assert all(call.is_whole for call in whole.tool_calls)
        whole = with_own_ids(whole)
        assert with_own_ids(parsed(writer.form, prompt, list(text))) == whole
        ids = tokenizer.encode(text, add_special_tokens=False)
        by_token = [tokenizer.decode(ids[:at]).rstrip("\ufffd") for at in range(len(ids) + 1)]
        pieces = [after[len(before) :] for before, after in zip(by_token, by_token[1:], strict=False)]
        assert "".join(pieces) == text and with_own_ids(parsed(writer.form, prompt, pieces)) == whole
        # One parser goes on by characters; at each place a copy of it takes the rest at once.
        parser, seen = writer.form.parser(prompt, TOOLS, new_id=lambda: ""), Message()
        for at in range(len(text)):
            rest = copy.deepcopy(parser)
            found = copy.deepcopy(seen).add(rest.push(text[at:])).add(rest.finish())
            assert with_own_ids(found) == whole, (text[:at], text[at:])
            seen.add(parser.push(text[at]))
        num_calls += len(whole.tool_calls)


def test_what_is_thought_before_calls_with_tags_is_no_answer():
    """The prompt opens the thinking; a call that is named within is none. In any pieces."""
    writer = Writer(replace(STYLES["Qwen3.5"], thinks=True))
    call = {"name": "f", "arguments": {"text": "a\nb", "count": 3, "more": {"a": [1]}}}
    thought = "Should I <tool_call>\n<function=g>\n</function>\n</tool_call>?"
    message = dict(role="assistant", content="So:", tool_calls=[dict(id="1", type="function", function=call)])
    prompt, text = writer.answer(message | dict(reasoning_content=thought))
    assert prompt.endswith("<think>\n") and text.startswith("Should I")
    for pieces in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
        found = parsed(writer.form, prompt, pieces)
        assert (found.reasoning.strip(), found.content.strip()) == (thought, "So:")
        assert [(one.name, json.loads(one.arguments)) for one in found.tool_calls] == [("f", call["arguments"])]


def with_own_ids(message):
    for number, call in enumerate(message.tool_calls):
        call.id = str(number)
    return message


@pytest.mark.parametrize("key", ["k" * 301, "k" * 301 + "</arg_key>", "k</arg_key>x"])
def test_what_is_no_argument_is_text_behind_the_call_once(key):
    wanted = f"<arg_key>{key}"
    for pieces in ([f"<tool_call>f{wanted}"], list(f"<tool_call>f{wanted}")):
        found = parsed(AnswerFormat("glm45"), "", pieces)
        assert found.content == wanted and [(call.arguments, call.is_whole) for call in found.tool_calls] == [
            ("{}", True)
        ]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("glm45", "<tool_call>f<arg_key>tex"),
        ("glm45", "<tool_call>f<arg_key>text</arg_key><arg_v"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=tex"),
    ],
)
def test_a_call_that_is_cut_off_within_a_key_leaves_no_text(parser, text):
    found = parsed(AnswerFormat(parser), "", [text])
    assert not found.content and [(call.name, call.arguments, call.is_whole) for call in found.tool_calls] == [
        ("f", "", False)
    ]
