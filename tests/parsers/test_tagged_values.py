"""Arguments between tags: what a grammar makes is what the reader returns, and it fulfils the schema."""

import json
import random

import jsonschema
import pytest
from written_calls import STYLES, Writer, parsed

from nanoinfer import SamplingParams
from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.branches import Unenforceable
from nanoinfer.parsers.schema_types import json_of
from nanoinfer.parsers.tools import Tool
from nanoinfer.serve.tool_use import ToolUse

llguidance = pytest.importorskip("llguidance")
hf = pytest.importorskip("llguidance.hf")
TAGGED = [name for name, style in STYLES.items() if style.parser in ("qwen3_coder", "seed_oss", "glm45")]
TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<seed:tool_call>")
DEFINED = {
    "Unit": {"enum": ["m", "km"]},
    "Name": {"type": "string", "minLength": 1, "maxLength": 3},
    "Place": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module", params=[f"{style}, {tags}" for style in TAGGED for tags in ("texts", "tokens")])
def writer(request):
    style, tags = request.param.split(", ")
    made = Writer(STYLES[style], [tag for tag in TAGS if tags == "tokens" and tag in STYLES[style].text()])
    made.llg = hf.from_tokenizer(made.tokenizer, eos_token=[made.tokenizer.convert_tokens_to_ids("</s>")])
    return made


def value_schema(draw, depth=2):
    plain = [
        {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 20}, {"type": "boolean"}, {"type": "null"},
        {"type": "number"}, {"enum": ["a", "null", "5"]}, {"enum": ["a", 5, None, True]}, {"const": "x y"},
        {"const": 7},
        {"$ref": "#/$defs/Unit"}, {"$ref": "#/$defs/Name"}, {"$ref": "#/$defs/Place"}, {"type": ["string", "null"]},
        {"type": "string", "pattern": "^[ab]{1,3}$"}, {"type": "string", "pattern": r"\d-\w"},
        {"type": "string", "minLength": 2},
        {"type": "array", "items": {"type": "string", "maxLength": 3}}, {"type": "object"}, {}, True,
    ]  # fmt: skip
    if depth == 0 or draw.random() < 0.6:
        return draw.choice(plain)
    some = [value_schema(draw, depth - 1) for _ in range(2)]
    kind = draw.choice(("anyOf", "anyOf", "allOf", "optional", "oneOf"))
    if kind == "optional":
        return {"anyOf": [some[0], {"type": "null"}], "default": None, "title": "T"}
    return {kind: some}


def tool_schema(draw):
    names = ["city", "count", "a b", "it"][: draw.randrange(1, 5)]
    schema = {"type": "object", "$defs": DEFINED, "properties": {name: value_schema(draw) for name in names}}
    if draw.random() < 0.2:
        schema["properties"]["never"] = False
    schema["required"] = draw.sample([*names, "beyond"], draw.randrange(2))
    if draw.random() < 0.3:
        schema["minProperties"] = draw.randrange(1, len(names) + 1)
    if draw.random() < 0.2:
        schema["maxProperties"] = draw.randrange(1, len(names) + 1)
    if draw.random() < 0.3:
        schema["additionalProperties"] = draw.choice((False, {"type": ["integer", "string"]}))
    return schema


PIECES = (
    "a", "b", "m", "km", "x y", "null", "None", "true", "5", "-3", "0.5", "7", "1e5", "{", "}", "[", "]", '"', ", ",
    ": ", "\n", " ", "é", "1-a", "</", "</parameter", "</parameter>", "<parameter=", "</function>", "</arg_value",
    "</tool_call>", "[1, 2]",
)  # fmt: skip


def made_by(grammar, writer, draw):
    """A text that follows a grammar, by random pieces and what closes; None: it did not end in time."""
    matcher = llguidance.LLMatcher(writer.llg, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    closing = ["\n</parameter>\n", "</parameter>\n", "</arg_value>\n", "</function>", "</tool_call>", '"', "]", "}"]
    ids, encode = [], lambda text: writer.tokenizer.encode(text, add_special_tokens=False)
    for _ in range(300):
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.5):
            return writer.tokenizer.decode(ids)
        given = matcher.compute_ff_tokens()
        if not given:
            pieces = draw.sample(PIECES, len(PIECES))
            pieces = (draw.sample(closing, len(closing)) + pieces) if draw.random() < 0.4 else pieces + closing
            tried = (encode(piece) for piece in pieces)
            given = next((one for one in tried if one and matcher.validate_tokens(one) == len(one)), None)
        if not given:
            allowed = [
                i
                for i in draw.sample(range(len(writer.tokenizer)), 3000 % len(writer.tokenizer))
                if matcher.validate_tokens([i])
            ]
            if not allowed:
                return None
            given = allowed[:1]
        assert matcher.consume_tokens(given), matcher.get_error()
        ids += given
    return None


def test_what_a_grammar_makes_is_what_the_reader_returns_and_the_schema_allows(writer, fuzz):
    draw, num_made, num_refused = random.Random(5), 0, 0
    for number in range(400 if fuzz else 14):
        tool = Tool("f", tool_schema(draw), is_strict=True)
        try:
            grammar = writer.form.call_grammar("", [tool], is_parallel=False)
        except Unenforceable:
            num_refused += 1
            continue
        for _ in range(3):
            text = made_by(grammar, writer, draw)
            if text is None:
                continue
            found = parsed(writer.form, "", [text], [tool])
            assert not found.content.strip() and [call.is_whole for call in found.tool_calls] == [True], (text, found)
            arguments = json.loads(found.tool_calls[0].arguments)
            jsonschema.Draft202012Validator(tool.parameters).validate(arguments)
            assert parsed(writer.form, "", list(text), [tool]).tool_calls[0].arguments == found.tool_calls[0].arguments
            num_made += 1
    assert num_made > number / 2 and num_refused < number / 2, (num_made, num_refused)


def call(writer, **arguments):
    calls = [{"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    prompt, text = writer.answer({"role": "assistant", "content": "", "tool_calls": calls})
    return prompt, text.strip("\n")


def accepts(writer, schema, text):
    grammar = writer.form.call_grammar("", [Tool("f", schema)], is_parallel=False)
    matcher = llguidance.LLMatcher(writer.llg, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_the_server_names_the_tool_whose_schema_cannot_hold(writer):
    tools = Tool("g"), Tool("f", {"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}})
    with pytest.raises(RequestError, match="calls of the tool 'f' cannot .* as tool_choice asks: 'dependentRequired'"):
        ToolUse(tools, "required").constrained(SamplingParams(), writer.form, "")


def test_a_string_that_may_be_null_comes_without_quotes(writer):
    schema = {
        "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
        "required": ["city"],
    }
    _, text = call(writer, city="Oslo")
    assert accepts(writer, schema, text)
    assert json.loads(parsed(writer.form, "", [text], [Tool("f", schema)]).tool_calls[0].arguments) == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {}, "required": ["b"]}, {"b": "x"}, {}),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, {"b": "x"}, {}),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, {"b": "x"}, {"a": "x", "b": "x"}),
        ({"properties": {"a": {}, "b": False}}, {"a": "x"}, {"b": "x"}),
        (
            {"properties": {"a": {"allOf": [{"$ref": "#/$defs/U"}]}}, "$defs": {"U": {"enum": ["m"]}}},
            {"a": "m"},
            {"a": "k"},
        ),
        ({"properties": {"a": {"type": "string", "pattern": "^[ab]+$"}}}, {"a": "ab"}, {"a": "abc"}),
    ],
)
def test_each_part_of_a_schema_holds(writer, schema, right, wrong):
    assert accepts(writer, schema, call(writer, **right)[1]) and not accepts(writer, schema, call(writer, **wrong)[1])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "without anyOf"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"enum": ["x"]}]}}}, "oneOf"),
        ({"properties": {"a": False}, "required": ["a"]}, "no value is allowed"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "pattern"),
        ({"properties": {"a": {"type": "string", "maxLength": 10**6}}}, "length above"),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"properties": {"a": {}}, "minProperties": 3}, "properties cannot"),
        ({"properties": {"a>b": {}}}, "the name"),
    ],
)
def test_what_cannot_be_made_to_hold_is_refused_by_name(writer, schema, message):
    with pytest.raises(Unenforceable, match=message):
        writer.form.call_grammar("", [Tool("f", schema)])


@pytest.mark.parametrize(
    ("text", "types", "wanted"),
    [
        ("[1e999]", {"array"}, "[1e999]"),
        ("1e00000000005", {"number"}, "1e00000000005"),
        ("[NaN]", {"array", "string"}, '"[NaN]"'),
        ("[1, 'a']", {"array"}, '[1, "a"]'),
    ],
)
def test_numbers_stay_as_they_are_written(text, types, wanted):
    assert json_of(text, frozenset(types)) == wanted
