"""Calls of LFM2 and LFM2.5: what models write that no template does, in whatever pieces; and calls in a history."""

import json
import random

import pytest
from written_calls import LFM2, LFM2_5, parsed

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.branches import Unenforceable
from nanoinfer.parsers.grammar import SHAPES, CallGrammar
from nanoinfer.parsers.keyword_values import KeywordValues
from nanoinfer.parsers.tools import Tool

FORM = AnswerFormat.of(LFM2)
BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


def read(text, form=FORM):
    """Content, and of each call its name, its arguments and whether it is whole; the same of pieces of any length."""
    found = []
    for size in (len(text), 1, 3):
        message = parsed(form, "", [text[at : at + size] for at in range(0, len(text), size)])
        calls = [(call.name, call.arguments, call.is_whole) for call in message.tool_calls]
        found.append((message.content, message.reasoning, calls))
    assert found[1:] == found[:1] * 2, text
    return found[0]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('candidate_id="12345"', {"candidate_id": "12345"}),
        ("", {}),
        ("a='x', ", {"a": "x"}),
        ("a='it's', b=1", {"a": "it's", "b": 1}),
        ("code='print(\"x\") or f('y')', n=2", {"code": "print(\"x\") or f('y')", "n": 2}),
        ("a='''x\n'y' ''', b=''", {"a": "x\n'y' ", "b": ""}),
        (r'a="C:\new\d\x41\u00e9\U0001F600\'"', {"a": "C:\new\\dA\u00e9\U0001f600'"}),
        ("a=[1, 'b\\'c', None, (True,), [],]", {"a": [1, "b'c", None, [True], []]}),
        ("b={'k': {}, 2: null, x: 1}", {"b": {"k": {}, "2": None, "x": 1}}),
        ("a=.5, b=-1_000, c=+3, d=1e-07, e=007, f=5.", {"a": 0.5, "b": -1000, "c": 3, "d": 1e-7, "e": "007", "f": 5.0}),
        ("unit=celsius, day=2024-01-02, on=true", {"unit": "celsius", "day": "2024-01-02", "on": True}),
        ("größe = 5 ,\n x-y\t=\n'a'", {"größe": 5, "x-y": "a"}),
    ],
)  # fmt: skip
def test_arguments_are_what_python_has_for_them(written, arguments):
    for before, behind in (("[", "]"), ("", ""), (" [ ", " ] ")):
        text = f"Yes. {BEGIN}{before}a.f-1({written}){behind}{END} Then."
        content, _, [(name, found, is_whole)] = read(text)
        assert (content, name, json.loads(found), is_whole) == ("Yes.Then.", "a.f-1", arguments, True)


def test_several_calls():
    two = ("", "", [("f", '{"a": 1}', True), ("g", "{}", True)])
    for text in (
        f"{BEGIN}[f(a=1), g()]{END}",
        f"{BEGIN}[f(a=1)\ng()]{END}",
        f"{BEGIN}[f(a=1)]{END}\n{BEGIN}[g()]{END}",
        f'{BEGIN}[{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g", "arguments": {{}}}}]{END}',
        f'{BEGIN}{{"name": "f", "arguments": {{"a": 1}}}}{END}{BEGIN}g(){END}',
    ):
        assert read(text) == two


@pytest.mark.parametrize(
    ("text", "content", "call"),
    [
        (f"{BEGIN}[f(a='x'{END}ok", "ok", ("f", '{"a": "x"}', True)),
        (f"{BEGIN}[f(a='x')", "", ("f", '{"a": "x"}', True)),
        (f"{BEGIN}[f(a='x'", "", ("f", '{"a": "x"', False)),
        (f"{BEGIN}[f(a='x", "", ("f", '{"a": "x', False)),
        (f"{BEGIN}[f(a=1", "", ("f", '{"a": 1', False)),
        (f"{BEGIN}[f(a=[1, ", "", ("f", '{"a": [1', False)),
        (f"{BEGIN}[f(a", "", ("f", "", False)),
        (f"{BEGIN}[f(a=1)]<|tool_c", "", ("f", '{"a": 1}', True)),
        (f"{BEGIN}[f('x')]{END}", f"{BEGIN}[f('x')]{END}", None),
        (f"{BEGIN}[]{END}", f"{BEGIN}[]{END}", None),
        (f"{BEGIN}[f", f"{BEGIN}[f", None),
        (f"{BEGIN}I call f.", f"{BEGIN}I call f.", None),
    ],
)
def test_what_is_cut_off_or_is_no_call(text, content, call):
    assert read(text) == (content, "", [call] if call else [])


def test_what_no_python_is_goes_on_as_it_was_written_up_to_the_end():
    content, _, [(name, arguments, _)] = read(f"{BEGIN}[f(d=date(2024, 1))]{END}x")
    assert (content, name, arguments) == ("x", "f", '{"d": date(2024, 1))]')


PARTS = (
    BEGIN,
    END,
    *"[](){}=,:'\"\\1x \n",
    "'''",
    "u00e9",
    "f(",
    "a=",
    ", ",
    "None",
    "<|tool",
    '{"name": "f", "arguments": {',
)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled("3")
def test_any_text_is_read_alike_in_any_pieces(seed):
    draw = random.Random(seed)
    for _ in range(150):
        begin = draw.choice(("", BEGIN, f"{BEGIN}[f(", f"{BEGIN}[f(a='", f"{BEGIN}[f(a=["))
        text = begin + "".join(draw.choice(PARTS) for _ in range(draw.randrange(14)))
        _, _, calls = read(text or "x")
        assert len(calls) <= text.count("(") + text.count("{")


def test_what_is_thought_comes_first():
    thinking = AnswerFormat.of(LFM2_5)
    text = f"<think>\nf is {BEGIN}?\n</think>Now. {BEGIN}[f()]{END}"
    assert read(text, thinking) == ("Now.", f"f is {BEGIN}?", [("f", "{}", True)])
    assert thinking.thinking.field == "thinking"


def call_of(number, name, arguments):
    return {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [call_of(1, "f", '{"a": "it\'s \\"x\\"", "b": [1, null]}'), call_of(2, "g", '{"c": {"d": true}, "e": true}')]
CALLED = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]


def test_calls_that_a_template_does_not_write_begin_the_content():
    shown = FORM.messages(CALLED)[1]
    text = f'{BEGIN}[f(a="it\'s \\"x\\"", b=[1, None]), g(c={{"d": true}}, e=True)]{END}Let me see.'
    assert shown == {"role": "assistant", "content": text}
    _, _, calls = read(shown["content"])
    assert [json.loads(arguments) for _, arguments, _ in calls] == [
        {"a": 'it\'s "x"', "b": [1, None]},
        {"c": {"d": True}, "e": True},
    ]
    shown = AnswerFormat.of(LFM2_5).messages(CALLED)[1]
    assert len(shown["tool_calls"]) == 2 and shown["content"] == "Let me see."


def test_calls_that_were_cut_off_are_written_too():
    cut = call_of(1, "f", '{"a": "x')
    shown = FORM.messages([CALLED[0], {"role": "assistant", "content": "", "tool_calls": [cut]}])[1]
    assert shown["content"] == f'{BEGIN}[f(arguments="{{\\"a\\": \\"x")]{END}'


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a b": {}}}, "the name"),
        ({"properties": {"a": {}}, "minProperties": 1}, "a number of arguments"),
        (
            {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False, "patternProperties": {}},
            "pattern",
        ),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"type": "integer"}]}}}, "no value"),
    ],
)
def test_schemas_that_no_grammar_holds_are_refused(schema, said):
    with pytest.raises(Unenforceable, match=said):
        KeywordValues(lambda name, body: name, {}).of("a", schema)


def test_arguments_of_a_grammar():
    llguidance, hf = pytest.importorskip("llguidance"), pytest.importorskip("llguidance.hf")
    from trained_tokenizers import make_tokenizer

    tokenizer = make_tokenizer("qwen")
    made = hf.from_tokenizer(tokenizer)
    properties = {"unit": {"enum": ["c", "f's"]}, "day": {"type": "string", "maxLength": 3}, "any": {}}
    strict = Tool("f", {"properties": properties, "required": ["day"], "additionalProperties": False})
    grammar = CallGrammar(SHAPES["lfm2"], {}).of([strict, Tool("g")])

    def accepts(arguments):
        found = llguidance.LLMatcher(made, grammar, log_level=0)
        assert not found.is_error(), found.get_error()
        ids = tokenizer.encode(f"{BEGIN}[{arguments}]{END}", add_special_tokens=False)
        return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()

    for right in (
        'f(unit="c", day="abc")',
        "f(unit='c', day=\"abc\", any='x\\'y')",
        'f(day="", any=[1, {"a": null}]), g()',
        "g(x=1, y_2=None, z=True), f(day=\"a\")",
    ):  # fmt: skip
        assert accepts(right), right
    for wrong in (
        "f()",
        'f(day="abcd")',
        "f(day='abc')",
        'f(day="a", unit="c")',
        'f(day="a", b=1)',
        "f(unit='x', day=\"\")",
    ):
        assert not accepts(wrong), wrong
