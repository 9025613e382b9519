"""Arguments in Gemma 4's form: what a grammar takes of a schema, and what is read of texts that are not quite so."""

import json

import pytest
from written_calls import STYLES, Writer, parsed

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.branches import Unenforceable
from nanoinfer.parsers.tools import Tool

llguidance = pytest.importorskip("llguidance")
hf = pytest.importorskip("llguidance.hf")
MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.fixture(scope="module", params=[(), MARKS], ids=["texts", "tokens"])
def writer(request):
    writer = Writer(STYLES["Gemma-4"], request.param)
    writer.llg = hf.from_tokenizer(writer.tokenizer, eos_token=[writer.tokenizer.convert_tokens_to_ids("</s>")])
    return writer


def takes(writer, schema, value):
    """Whether the grammar of a tool with one argument takes a call with this value."""
    tool = Tool("f", {"properties": {"v": schema}, "required": ["v"]})
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"v": value}}}]
    prompt, text = writer.answer({"role": "assistant", "content": "", "tool_calls": calls})
    found = llguidance.LLMatcher(writer.llg, writer.form.call_grammar(prompt, [tool]), log_level=0)
    assert not found.is_error(), found.get_error()
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    taken = found.try_consume_tokens(ids) == len(ids) and found.is_accepting()
    (call,) = parsed(writer.form, prompt, [text], [tool]).tool_calls
    assert json.loads(call.arguments) == {"v": value} and call.is_whole
    return taken


CASES = {
    "choices": ({"enum": ["a", "", 5, None, True]}, ["a", "", 5, None, True], ["b", 6, False]),
    "a pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", "", 5]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "ab\n"], ["a", "abcd"]),
    "limits": ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, 3.5, "3"]),
    "items": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1] * 3],
    ),
    "no items": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "any items": ({"type": "array"}, [[], [1, "a", [None, {"b": True}]]], [1]),
    "a nested object": (
        {
            "type": "object", "required": ["b"], "additionalProperties": False,
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "C": {"type": "boolean"}},
        },
        [{"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "", "C": True}],
        [{}, {"a": 1}, {"b": 1}, {"b": "x", "d": 1}],
    ),
    "members of one type": (
        {"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}],
    ),
    "no members": ({"type": "object", "additionalProperties": False}, [{}], [{"x": 1}]),
    "one of several": ({"anyOf": [{"type": "null"}, {"type": "integer"}, {"const": "x"}]}, [None, 5, "x"], [True, "y"]),
    "anything": ({}, [None, 5, "a", [1], {"k": {"l": -1.5}}], []),
    "nothing said of an object": ({"type": "object"}, [{}, {"k": "v"}], ["a", 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_grammar_takes_what_fulfils_the_schema(writer, name):
    schema, right, wrong = CASES[name]
    assert [takes(writer, schema, value) for value in right] == [True] * len(right)
    assert [takes(writer, schema, value) for value in wrong] == [False] * len(wrong)


def test_an_object_may_have_a_thousand_members(writer):
    properties = {f"k{number:04}": {"type": "integer"} for number in range(1500)}
    grammar = writer.form.call_grammar("", [Tool("f", {"properties": properties, "required": ["k0007"]})])
    found = llguidance.LLMatcher(writer.llg, grammar, log_level=0)
    for text, is_right in (("k0007:1,k1499:2", True), ("k0008:1", False)):
        ids = writer.tokenizer.encode(f"<|tool_call>call:f{{{text}}}<tool_call|>", add_special_tokens=False)
        state = found.deep_copy()
        assert (state.try_consume_tokens(ids) == len(ids)) == is_right


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "contains": {}}, "'contains' cannot be made to hold"),
        ({"enum": [[1]]}, "choices that are lists or objects"),
        (False, "no value fulfils it"),
    ],
)
def test_what_cannot_be_written_is_refused(writer, schema, said):
    with pytest.raises(Unenforceable, match=said):
        writer.form.call_grammar("", [Tool("f", {"properties": {"v": schema}, "required": ["v"]})])


def read(text):
    """What is said and called, whole and in pieces of one character and three."""
    ways = []
    for size in (len(text), 1, 3):
        found = parsed(AnswerFormat("gemma4"), "", [text[at : at + size] for at in range(0, len(text), size)])
        ways.append((found.content, [(call.name, call.arguments, call.is_whole) for call in found.tool_calls]))
    assert ways[0] == ways[1] == ways[2]
    return ways[0]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("{}", "{}"),
        ("{ a : 1 , b: true }", '{"a": 1, "b": true}'),
        ("{a:Paris,b:New York,c:None,d:True}", '{"a": "Paris", "b": "New York", "c": null, "d": true}'),
        ('{<|"|>a<|"|>:<|"|>{"x": "<|y"}\n<|"|>}', '{"a": "{\\"x\\": \\"<|y\\"}\\n"}'),
        ('{a:[[],{b:[1.5e-3,<|"|><|"|>]}]}', '{"a": [[], {"b": [1.5e-3, ""]}]}'),
    ],
)
@pytest.mark.parametrize("end", ["<tool_call|>", "\n<tool_call|>", ""])
def test_arguments_become_json(arguments, wanted, end):
    assert read(f"Yes. <|tool_call>call:a.b{arguments}{end}") == ("Yes.", [("a.b", wanted, True)])


def test_several_calls_follow_each_other_and_text_may_stand_behind():
    text = "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>\nSo."
    assert read(text) == ("So.", [("f", '{"a": 1}', True), ("g", "{}", True)])


@pytest.mark.parametrize("text", ["<|tool_call>", "<|tool_call>call", "<|tool_call>call:f", "<|tool_call>f{a:1}"])
def test_what_is_no_call_is_text(text):
    assert read(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{a:1,}<tool_call|>", '{"a": 1, }'),
        ('{a:<|"|>x', '{"a": "x'),
        ("{a:[1", '{"a": [1'),
        ("{a:1<b>}<tool_call|>", '{"a": 1<b>}'),
    ],
)
def test_arguments_that_go_wrong_are_given_as_they_were_written(text, arguments):
    assert read(f"<|tool_call>call:f{text}") == ("", [("f", arguments, text.endswith("|>"))])
