"""The JSON Schema Test Suite: grammars take what it calls valid, and refuse what it calls invalid."""

import json
from collections.abc import Iterator
from itertools import islice, permutations, product

import pytest
from json_schema_suite import cases_of_files
from structured import END, VOCAB, make_structured_tokenizer

from nanoinfer.common.errors import RequestError
from nanoinfer.structured.compiler import GrammarCompiler
from nanoinfer.structured_outputs import StructuredOutputsParams

FILES = cases_of_files()
TOKENIZER = make_structured_tokenizer()
SAMPLE = ("additionalProperties", "anyOf", "const", "format", "items", "maxItems", "not", "oneOf", "refRemote", "type")
MOST_ORDERS = 1000
# Valid data that no text of the grammar says. None is invalid and taken.
STRICTER = {
    # A number that is whole has one form where the schema says which, or that it is an integer.
    "const: const with 0 does not match other zero-like types": ["float zero is valid"],
    "const: const with 1 does not match true": ["float one is valid"],
    "const: const with -2.0 matches integer and float types": ["float -2.0 is valid"],
    "const: float and integers are equal up to 64-bit representation limits": ["float is valid"],
    "enum: enum with 0 does not match false": ["float zero is valid"],
    "enum: enum with [0] does not match [false]": ["[0.0] is valid"],
    "enum: enum with 1 does not match true": ["float one is valid"],
    "enum: enum with [1] does not match [true]": ["[1.0] is valid"],
    "type: integer type matches integers": ["a float with zero fractional part is an integer"],
} | {
    # A format holds, where the draft has it as a remark.
    f"format: {kind} format": [f"invalid {kind} string is only an annotation by default"]
    for kind in ("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration")
}


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(frozenset([TOKENIZER.convert_tokens_to_ids(END)]), VOCAB)
    yield compiler
    compiler.close()


def orders(value) -> Iterator:
    """A value with its properties in each order: a grammar has one, that of the schema."""
    if isinstance(value, dict):
        for names in permutations(value):
            for values in product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, values, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(list(orders(one)) for one in value)))
    else:
        yield value


def takes(grammar, value) -> bool:
    """Whether a grammar makes a value's compact text, with the properties in some order."""
    for one in islice(orders(value), MOST_ORDERS):
        matcher = grammar.initial.deep_copy()
        ids = TOKENIZER.encode(json.dumps(one, separators=(",", ":"), ensure_ascii=False))
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            return True
    return False


def test_what_is_stricter_is_a_case_that_is_taken():
    taken = {case.name for cases in FILES.values() for case in cases if case.refusal is None}
    assert STRICTER.keys() <= taken and len(taken) == 174


@pytest.mark.parametrize("file", FILES)
@pytest.mark.sampled(*SAMPLE)
def test_a_schema_is_refused_with_the_reason_or_takes_what_is_valid_and_nothing_else(compiler, file):
    for case in FILES[file]:
        params = StructuredOutputsParams(json=case.schema)
        if case.refusal is not None:
            with pytest.raises(RequestError, match="structured_outputs.json cannot be generated") as caught:
                compiler.compile(params, TOKENIZER)
            assert case.refusal in str(caught.value) and caught.value.field == "structured_outputs", case.name
            continue
        grammar = compiler.compile(params, TOKENIZER)
        found = {description: takes(grammar, data) for description, data, _ in case.tests}
        wanted = {description: is_valid for description, _, is_valid in case.tests}
        stricter = STRICTER.get(case.name, [])
        assert found == wanted | dict.fromkeys(stricter, False), case.name
        assert all(wanted[description] for description in stricter), case.name
