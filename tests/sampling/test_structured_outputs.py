"""The form that a completion must have: what may be given, and what messages say of what may not."""

import json
import re

import pytest
from pydantic import BaseModel

from nanoinfer import SamplingParams, StructuredOutputsParams
from nanoinfer.common.errors import UnknownNameError
from nanoinfer.structured_outputs import MAX_CHARS, MAX_REGEX_CHARS

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


class Person(BaseModel):
    name: str


@pytest.mark.parametrize(
    "given, kind",
    [
        (dict(json=SCHEMA), "json"),
        (dict(json=json.dumps(SCHEMA)), "json"),
        (dict(json=True), "json"),
        (dict(regex="[ab]+"), "regex"),
        (dict(choice=["yes", "no", "yes"]), "choice"),
        (dict(grammar='root ::= "a"'), "grammar"),
        (dict(json_object=True), "json_object"),
        (dict(structural_tag={"triggers": [], "structures": []}), "structural_tag"),
    ],
)
def test_one_kind_is_given_as_an_object_or_as_a_dict(given, kind):
    params = StructuredOutputsParams(**dict(json_object=False) | given)
    assert params.kind == kind
    sampling = SamplingParams(structured_outputs=given)
    assert sampling.structured_outputs == params == sampling.clone().structured_outputs
    assert hash(params) == hash(StructuredOutputsParams(**given)), "grammars are kept by what they were made of"
    assert SamplingParams(structured_outputs=params).structured_outputs is params


def test_what_was_given_is_kept_as_text_or_a_tuple_and_in_its_order():
    assert StructuredOutputsParams(json=SCHEMA).json == json.dumps(SCHEMA)
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")
    schema = dict(SCHEMA)
    params = StructuredOutputsParams(json=schema)
    schema.clear()
    assert json.loads(params.json) == SCHEMA


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "structured_outputs says nothing: give one of json, regex, choice, grammar, json_object, structural_tag"),
        (dict(json_object=False), "structured_outputs says nothing"),
        (dict(json=SCHEMA, regex="a"), "structured_outputs has json and regex: give one of"),
        (dict(json="{"), r"structured_outputs.json is '{': it must be a JSON Schema.*\(Expecting"),
        (dict(json=[1]), r"structured_outputs.json is \[1\]: it must be a JSON Schema"),
        (dict(json='"text"'), "structured_outputs.json is 'text': it must be a JSON Schema"),
        (dict(json={"const": {1}}), "structured_outputs.json is .*not JSON serializable"),
        (dict(json=Person), r"structured_outputs.json is .*Person.*give Person.model_json_schema\(\)|not JSON"),
        (dict(json="[" * 10**5), "structured_outputs.json is .*nested too deeply"),
        (dict(structural_tag=True), "structured_outputs.structural_tag is True: it must be an object"),
        (dict(regex=""), "structured_outputs.regex is '': it must be a text that is not empty"),
        (dict(grammar=1), "structured_outputs.grammar is 1: it must be a text"),
        (dict(choice="yes"), "structured_outputs.choice is 'yes': it must be a list of texts"),
        (dict(choice=[]), r"structured_outputs.choice is \[\]: it must be a list of texts, none of them empty"),
        (dict(choice=["a", ""]), "structured_outputs.choice is .*; '' is none"),
        (dict(choice=["a", 1]), "structured_outputs.choice is .*; 1 is none"),
        (dict(json_object="yes"), "structured_outputs.json_object is 'yes': it must be True or False"),
        (dict(regex="a", disable_any_whitespace=True), "disable_any_whitespace goes with JSON, not with regex"),
        (dict(choice=["a"], whitespace_pattern=" "), "whitespace_pattern goes with JSON, not with choice"),
        (dict(json=SCHEMA, disable_any_whitespace=True, whitespace_pattern=" "), "give one of them"),
        (
            dict(grammar="a" * (MAX_CHARS + 1)),
            "structured_outputs.grammar has 1048577 characters, 1048576 are possible",
        ),
        (dict(regex="a" * (MAX_REGEX_CHARS + 1)), "structured_outputs.regex has 32769 characters, 32768 are possible"),
        (dict(choice=["a" * MAX_CHARS, "b"]), "structured_outputs.choice has 1048577 characters"),
        (dict(regex="a", backend="xgrammar"), "backend='xgrammar' is not supported, but for 'auto': llguidance"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_name(given, message):
    for make in (StructuredOutputsParams, lambda **given: SamplingParams(structured_outputs=given)):
        with pytest.raises(ValueError, match=message):
            make(**given)


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(UnknownNameError, match="StructuredOutputsParams got an unknown argument 'jsn': did you mean"):
        StructuredOutputsParams(jsn={})
    with pytest.raises(UnknownNameError, match="structured_outputs has an unknown field 'choices'.*'choice'"):
        SamplingParams(structured_outputs=dict(choices=["a"]))
    with pytest.raises(ValueError, match=re.escape("structured_outputs is [1]: give structured_outputs=")):
        SamplingParams(structured_outputs=[1])
