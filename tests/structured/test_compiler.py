"""Grammars of every kind, compiled; what cannot be is refused with the reason, and what is hostile harms nobody."""

import json
import sys

import numpy as np
import pytest
from structured import END, VOCAB, make_structured_tokenizer

from nanoinfer.common.errors import RequestError
from nanoinfer.structured import compiler as compiler_module
from nanoinfer.structured.compiler import GrammarCompiler
from nanoinfer.structured.grammar import grammar_of
from nanoinfer.structured.matcher import Matcher
from nanoinfer.structured.trial import Trial
from nanoinfer.structured_outputs import StructuredOutputsParams

TOKENIZER = make_structured_tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "boolean"}}, "required": ["b"]}
TAGS = {"triggers": ["<f="], "structures": [{"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}]}


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(frozenset([END_ID]), VOCAB)


@pytest.fixture(scope="module")
def compiler():
    compiler = make_compiler()
    yield compiler
    compiler.close()


def allowed(matcher: Matcher, token_ids: list[int]) -> set[int]:
    """The tokens that may come behind these."""
    state = matcher.read(token_ids, 0)
    words = np.frombuffer(state.compute_bitmask(), dtype=np.int32)[: len(matcher.grammar.known)].copy()
    matcher.narrow(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def takes(grammar, text: str) -> bool:
    """Whether a whole text, in single bytes and special tokens, is one that the grammar makes."""
    matcher, token_ids = Matcher(grammar, [END_ID], 0), []
    for token_id in TOKENIZER.encode(text):
        if token_id not in allowed(matcher, token_ids):
            return False
        token_ids.append(token_id)
    return END_ID in allowed(matcher, token_ids)


@pytest.mark.parametrize(
    "given, wanted, unwanted",
    [
        (dict(json=SCHEMA), ['{"b": 12, "a": true}', '{ "b":1}'], ['{"a": true}', "{}", '{"b": 1']),
        (dict(json=True), ["1", "[]", '{"x": null}'], ["", "nul"]),
        (dict(json=SCHEMA, disable_any_whitespace=True), ['{"b":1,"a":true}'], ['{"b": 1}', '{"b":1} ']),
        (dict(json=SCHEMA, whitespace_pattern="_?"), ['{"b":_1}', '{_"b":1}'], ['{"b": 1}']),
        (dict(json=SCHEMA), ['{"b":1,"c":[]}'], []),
        (dict(json=SCHEMA, disable_additional_properties=True), ['{"b":1}'], ['{"b":1,"c":[]}']),
        (dict(json_object=True), ["{}", '{"a": [1]}'], ["[]", "1"]),
        (dict(regex="(yes|no)!{1,2}"), ["yes!", "no!!"], ["yes", "no!!!", "maybe!"]),
        (
            dict(choice=["yes", 'q"\n', "é😀\u2028", "\x01\x7f"]),
            ["yes", 'q"\n', "é😀\u2028", "\x01\x7f"],
            ["ye", "yes "],
        ),
        (dict(grammar='start: "a" <call> NUMBER\nNUMBER: /[0-9]+/'), ["a<call>10"], ["a10", "a<call>"]),
        (dict(grammar='root ::= "a" list\nlist ::= [0-9]+ | "(" list ")"'), ["a1", "a((22))"], ["a((1)", "a"]),
        (
            dict(structural_tag=TAGS),
            ["any text", 'first <f=add>{"b": 1}</f> and <f=add>{"b":2}</f>.', ""],
            ['<f=sub>{"b": 1}</f>', '<f=add>{"c": 1}</f>', '<f=add>{"b": 1}'],
        ),
        (
            dict(structural_tag=TAGS, disable_any_whitespace=True, disable_additional_properties=True),
            ['<f=add>{"b":1}</f>'],
            ['<f=add>{"b": 1}</f>', '<f=add>{"b":1,"c":2}</f>'],
        ),
    ],
)
def test_texts_have_the_form_that_is_asked_for(compiler, given, wanted, unwanted):
    grammar = compiler.compile(StructuredOutputsParams(**given), TOKENIZER)
    assert [text for text in wanted if not takes(grammar, text)] == []
    assert [text for text in unwanted if takes(grammar, text)] == []


def chain(count: int, link: dict) -> dict:
    """A schema in which each of `count` definitions refers to the next, as `link` says with "#next" and "#number"."""
    text = json.dumps(link)
    defs = {
        f"d{i}": json.loads(text.replace("#next", f"#/$defs/d{i + 1}").replace("#number", str(i))) for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "string"}}}


REFUSED = {
    "wrong type": (
        dict(json={"properties": {"x": {"items": {"anyOf": [{}, {"type": "strin"}]}}}}),
        "structured_outputs.json cannot be generated at #/properties/x/items/anyOf/1: Invalid type: strin",
    ),
    "in a definition": (
        dict(json={"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"q": {"uniqueItems": True, "type": "array"}}}}}),
        'at #/$defs/p/properties/q: Unimplemented keys: ["uniqueItems"]',
    ),
    "nothing": (dict(json=False), "structured_outputs.json cannot be generated: no text fulfils it"),
    "endless": (dict(json={"$ref": "#"}), "no text fulfils it"),
    "unsatisfiable": (
        dict(json={"type": "integer", "minimum": 2, "maximum": 1}),
        "minimum (2) is greater than maximum",
    ),
    "unknown reference": (dict(json={"$ref": "http://127.0.0.1:1/schema"}), "is not present in a registry"),
    "oneOf": (dict(json={"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "cannot be told apart.*: give anyOf"),
    "not a number": (dict(json='{"const": NaN}'), "structured_outputs.json cannot be generated: "),
    "regex": (dict(regex="a("), "structured_outputs.regex cannot be generated: .*unclosed group"),
    "look-ahead": (dict(regex="(?=a)b"), "look-ahead and look-behind, is not supported"),
    "grammar": (dict(grammar="start: foo"), 'structured_outputs.grammar cannot be generated: .*unknown name: "foo"'),
    "gbnf": (dict(grammar="root ::= ("), "structured_outputs.grammar cannot be generated: it cannot be read as GBNF"),
    "special token": (dict(grammar="start: <nope>"), 'unknown special token: "<nope>"'),
    "tags": (dict(structural_tag={"triggers": ["<f"]}), 'it has no triggers or no structures: give {"triggers"'),
    "tag": (
        dict(structural_tag=TAGS | {"structures": [{"begin": "<f=a>"}]}),
        "structures[0] lacks begin, schema or end",
    ),
    "trigger": (dict(structural_tag=TAGS | {"triggers": ["<g"]}), "structures[0].begin is '<f=add>', which no trigger"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_path_and_the_reason(compiler, name):
    given, message = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputsParams(**given), TOKENIZER)
    assert caught.value.field == "structured_outputs"
    for part in message.split(".*"):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_too_large_for_the_library_is_said_in_words(monkeypatch):
    compiler, panic = (
        make_compiler(),
        "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>",
    )
    monkeypatch.setattr(Trial, "fault", lambda *given: (panic, None))
    with pytest.raises(RequestError, match="cannot be generated: it needs more symbols than the 65,524 that"):
        compiler.compile(StructuredOutputsParams(regex="a+"), TOKENIZER)


PATTERNS = {"allOf": [{"$ref": "#next"}, {"type": "string", "pattern": "a.*b#number"}]}
HOSTILE = {
    "deep": dict(json='{"items":' * 400 + "{}" + "}" * 400),
    "patterns": dict(json=chain(60, PATTERNS)),
    "repetitions": dict(regex="(a?){1000}a{1000}"),
    "deep expression": dict(regex="(" * 16_000 + "a" + ")" * 16_000),
    "numbers": dict(json={"enum": list(range(120_000))}),
    "many rules": dict(grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(50)) + '\nr50: "a"'),
    "deep rules": dict(grammar="start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sampled("deep", "patterns", "repetitions", "many rules")
def test_hostile_grammars_are_refused_and_harm_nobody(monkeypatch, name):
    compiler = make_compiler()
    monkeypatch.setattr(compiler_module, "Trial", lambda *tokens: Trial(*tokens, limit_seconds=1.0))
    params, tried = StructuredOutputsParams(**HOSTILE[name]), []
    with pytest.raises(RequestError, match="structured_outputs.* cannot be generated.*:"):
        compiler.compile(params, TOKENIZER)
    fault = compiler.trial.fault
    monkeypatch.setattr(compiler.trial, "fault", lambda *given: tried.append(given) or fault(*given))
    with pytest.raises(RequestError):
        compiler.compile(params, TOKENIZER)
    assert not tried, "a refusal is kept"
    assert takes(compiler.compile(StructuredOutputsParams(regex="a+"), TOKENIZER), "aa") and len(tried) == 1
    compiler.close()


def test_references_that_overflow_a_usual_stack_are_compiled_on_a_large_one(compiler):
    schema = chain(1500, {"type": "object", "properties": {"a": {"$ref": "#next"}}})
    assert takes(compiler.compile(StructuredOutputsParams(json=schema), TOKENIZER), '{"a":{"a":{}}}')


def test_a_long_list_of_choices_is_compiled(compiler):
    choices = [f"value {number:06d}" for number in range(20_000)]
    for given in (dict(json={"enum": choices}), dict(choice=choices)):
        grammar = compiler.compile(StructuredOutputsParams(**given), TOKENIZER)
        text = "value 019999"
        assert takes(grammar, f'"{text}"' if "json" in given else text)


def test_a_trial_that_is_ended_answers_for_its_own_grammar_only():
    trial = Trial(["<call>"], VOCAB, limit_seconds=0.2)
    slow = grammar_of(StructuredOutputsParams(json=chain(60, PATTERNS)))
    simpler = "give a simpler one, with fewer references, patterns and optional properties"
    assert trial.fault(slow) == (f"it takes more than 0.2 s to compile: {simpler}", None)
    trial = Trial(["<call>"], VOCAB)
    good, bad = (grammar_of(StructuredOutputsParams(regex=regex)) for regex in ("a", "("))
    assert trial.fault(good) is None
    first = trial.process
    trial.process.kill()
    trial.process.wait()
    assert "unclosed group" in trial.fault(bad)[0] and trial.process is not first
    stdin, trial.process.stdin = trial.process.stdin, None
    with pytest.raises(AttributeError):  # as an interrupt would, at any line
        trial.fault(bad)
    stdin.close()
    assert trial.fault(good) is None
    trial.close()
    assert trial.fault(good) is None, "another process starts"
    trial.close()


def test_grammars_are_kept_but_not_all_of_them(compiler, monkeypatch):
    first, second, third = (StructuredOutputsParams(choice=[text]) for text in ("a", "b" * 9, "c"))
    kept = [compiler.compile(params, TOKENIZER) for params in (first, second)]
    assert [
        compiler.compile(StructuredOutputsParams(choice=list(params.choice)), TOKENIZER) for params in (first, second)
    ] == kept
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    compiler.compile(first, TOKENIZER)
    compiler.compile(third, TOKENIZER)
    assert list(compiler.kept) == [first, third], "the one that was not asked for longest is gone"
    monkeypatch.setattr(compiler_module, "MAX_KEPT_CHARS", 9)
    assert compiler.compile(second, TOKENIZER) is not kept[1] and list(compiler.kept) == [second]


def test_what_tokenizer_and_model_do_not_both_have_never_comes():
    params = StructuredOutputsParams(grammar='start: "a" | <[298]>')
    grammar = make_compiler().compile(params, TOKENIZER)
    a, other, call = TOKENIZER.convert_tokens_to_ids(["a", "é", "<call>"])
    assert len(TOKENIZER) < 298 and allowed(Matcher(grammar, [END_ID], 0), []) == {a}
    smaller = GrammarCompiler(frozenset([5]), call).compile(
        StructuredOutputsParams(grammar="start: <call> | /a/"), TOKENIZER
    )
    assert allowed(Matcher(smaller, [5], 0), []) == {a}
    with pytest.raises(ValueError, match="no token of this model goes on from here"):
        allowed(Matcher(make_smaller(call, "start: <call>"), [5], 0), [])


def make_smaller(vocab_size: int, grammar: str):
    return GrammarCompiler(frozenset([5]), vocab_size).compile(StructuredOutputsParams(grammar=grammar), TOKENIZER)


def test_end_tokens_come_early_only_where_nothing_else_may():
    grammar = make_compiler().compile(StructuredOutputsParams(regex="ab?b?"), TOKENIZER)
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    early, late = Matcher(grammar, [END_ID, b], 5), Matcher(grammar, [END_ID], 2)
    assert allowed(late, []) == {a} and allowed(late, [a]) == {b} and allowed(late, [a, b]) == {b, END_ID}
    assert allowed(early, []) == {a} and allowed(early, [a]) == {b, END_ID}, "all that is left would end it"
    with pytest.raises(ValueError, match="the grammar cannot go on from here"):
        late.read([a, b, a], 0)


def test_what_it_lacks_is_named(monkeypatch):
    params = StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="structured_outputs is about text, but there is no tokenizer"):
        make_compiler().compile(params, None)
    for ends in (frozenset(), frozenset([VOCAB + 5])):
        with pytest.raises(RequestError, match="needs a token that ends a text.*name eos_token_id"):
            GrammarCompiler(ends, VOCAB).compile(params, TOKENIZER)

    class Slow:
        def get_vocab(self):
            return TOKENIZER.get_vocab()

    with pytest.raises(RequestError, match="cannot be used with this tokenizer, which llguidance cannot read: "):
        make_compiler().compile(params, Slow())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"structured_outputs needs llguidance.*pip install -e '.\[structured\]'"):
        make_compiler().compile(params, TOKENIZER)
