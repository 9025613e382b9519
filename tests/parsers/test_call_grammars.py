"""Grammars of calls take every call that a published template writes, and no other arguments."""

import json
import random

import pytest
from written_calls import KINDS, STYLES, TOOLS, Writer, message_of, parsed

from nanoinfer.parsers.tools import Tool
from nanoinfer.structured.grammar import put_behind

llguidance = pytest.importorskip("llguidance")
hf = pytest.importorskip("llguidance.hf")
CITY = Tool("f", {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}, "required": ["count"]})
"""Whose calls have a count."""


_PLAIN = ("text", "count", "share")
TAGS = (
    "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] [CALL_ID] <|channel|> <|message|> <|constrain|> "
    "<|end|> <|start|> <arg_key> </arg_key> <arg_value> </arg_value> <seed:tool_call> </seed:tool_call> <seed:think> "
    '</seed:think> <|tool_call> <tool_call|> <|"|> <|channel> <channel|> <|tool_call_start|> <|tool_call_end|>'
).split()


@pytest.fixture(scope="module", params=[f"{style}, {tags}" for style in STYLES for tags in ("texts", "tokens")])
def writer(request):
    """With tags that are texts, or tokens of their own, as published vocabularies have most of them."""
    style, tags = request.param.split(", ")
    return Writer(STYLES[style], [tag for tag in TAGS if tags == "tokens" and tag in STYLES[style].text()])


def bare(text):
    return text.strip("\n")


def accepts(writer, grammar, text):
    """Whether all of a text follows a grammar; fails if it is none."""
    found = llguidance.LLMatcher(writer.llg, grammar, log_level=0)
    assert not found.is_error(), (found.get_error(), grammar)
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


@pytest.fixture(scope="module", autouse=True)
def readable(writer):
    end = writer.tokenizer.convert_tokens_to_ids("</s>")
    writer.llg = hf.from_tokenizer(writer.tokenizer, eos_token=[end])


def test_a_grammar_takes_the_calls_of_the_template(writer, fuzz):
    draw, num_calls = random.Random(11), 0
    # Some templates write other values than strings and numbers as Python has them, in no JSON.
    some = {"qwen3_coder": _PLAIN, "seed_oss": _PLAIN, "lfm2": (*_PLAIN, "is_on", "maybe")}
    kinds = some.get(writer.style.parser, tuple(KINDS))
    ends = {"qwen3_coder": ["</parameter>"], "seed_oss": ["</parameter>"], "glm45": ["</arg_value>", "</tool_call>"]}
    # A model writes a tag within a text in other tokens than the tokenizer gives it; what ends a value, it cannot say.
    unsaid = [*writer.added, *ends.get(writer.style.parser, ())]
    while num_calls < (300 if fuzz else 4):
        message = message_of(draw, writer.style, kinds)
        if any(tag in json.dumps(message["tool_calls"]) for tag in unsaid):
            continue
        prompt, text = writer.answer({**message, "content": ""})
        assert accepts(writer, writer.form.call_grammar(prompt, TOOLS), bare(text)), text
        num_calls += len(message["tool_calls"])


def call(writer, name="f", **arguments):
    calls = [{"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}]
    prompt, text = writer.answer({"role": "assistant", "content": "", "tool_calls": calls})
    return prompt, bare(text)


def test_a_grammar_takes_no_other_tool_and_no_other_arguments(writer):
    prompt, right = call(writer, count=5)
    grammar = writer.form.call_grammar(prompt, [CITY])
    assert accepts(writer, grammar, right)
    for wrong in (call(writer, name="g", count=5), call(writer, count="x"), call(writer, text="x"), ("", "Yes.")):
        assert not accepts(writer, grammar, wrong[1]), wrong[1]
    assert not accepts(writer, grammar, right[:-3])


def test_between_free_text_a_strict_tool_has_its_arguments_and_others_have_any(writer):
    free, strict = Tool("g"), Tool("f", CITY.parameters, is_strict=True)
    prompt, right = call(writer, text="a", count=5)
    grammar = writer.form.call_grammar(prompt, [free, strict], must_call=False)
    assert accepts(writer, grammar, right) and not accepts(writer, grammar, call(writer, count="x")[1])
    if writer.form.tool_parser == "openai":
        assert accepts(writer, grammar, "<|channel|>final<|message|>Yes.")
    else:
        assert accepts(writer, grammar, "Yes.\nNo.")
        before = "" if writer.form.tool_parser == "llama3_json" else "Let me see.\n"
        thought, end, called = right.rpartition("</think>")
        assert accepts(writer, grammar, thought + end + "\n" * bool(end) + before + called.lstrip("\n"))


def test_what_tools_have_in_common_is_in_a_grammar_once(writer):
    """Its symbols are numbered in 16 bits."""
    tools = [Tool(f"f{number}", CITY.parameters) for number in range(20)]
    prompt, right = call(writer, name="f17", count=5)
    grammar = writer.form.call_grammar(prompt, tools)
    num_values = 2 if writer.style.parser == "lfm2" else 1  # whose arguments are JSON one by one
    assert grammar.count("%json") == num_values
    assert accepts(writer, grammar, right) and not accepts(writer, grammar, call(writer, name="f17", count="x")[1])


def test_another_form_begins_behind_what_is_thought_and_nowhere_else(writer):
    form, number = writer.form, 'start: "a" /[0-9]/'
    begin, end = form.thinking.markers.begin, form.thinking.markers.end[0]
    if form.is_harmony:
        end = f"<|end|><|start|>assistant{end}"
    opening = "<|start|>assistant" if form.is_harmony else "A:"
    said = "<|channel|>final<|message|>a7" if form.is_harmony else "a7"
    for prompt, before in ((f"{opening}{begin}", ""), (opening, begin)):
        grammar = form.form_grammar(prompt)
        if grammar is None:
            assert before and not form.thinking.is_known, "only what the model knows may come before the form"
            continue
        if form.is_harmony and not before:
            continue  # no template begins a message's text
        grammar = put_behind(number, grammar)
        thought = f"{before}\nSo a < b:\na8.\n{end}\n" if not form.is_harmony else f"{before}So a < b.{end}"
        for text, is_right in ((f"{thought}a7", True), (f"{thought}a77", False), (f"{thought} a7", False)):
            assert accepts(writer, grammar, text) == is_right, text
        assert accepts(writer, grammar, said) == bool(before) and not accepts(writer, grammar, "b7")
        message = parsed(form, prompt, [f"{thought}a7"], tools=())
        assert (message.content, message.reasoning.strip("\n")[:8]) == ("a7", "So a < b")
    closed = form.form_grammar(f"{opening}{begin}\n\n{end}\n\n")
    assert closed is None, "the prompt has what is thought"
    assert form.form_grammar("A:", only_if_begun=True) is None
