"""Grammars of every kind, compiled; what cannot be is refused with the reason, and what is hostile harms nobody."""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from structured import END, VOCAB, make_structured_tokenizer
from tokenizers import AddedToken

from nanoinfer.common.errors import RequestError
from nanoinfer.structured import compiler as compiler_module
from nanoinfer.structured import trial as trial_module
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


DATE = {"type": "string", "format": "date"}
ZOD = {
    "never": ({"properties": {"a": {"not": {}}, "b": {}}}, ['{"b":1}'], ['{"a":1}']),
    "any name": (
        {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
        ['{"x":null}'],
        ['{"x":1}'],
    ),
    "names": (
        {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "null"}},
        ['{"y":null}'],
        ['{"z":null}'],
    ),
    "not unique": ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
    "date": (
        DATE,
        ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"8320-02-29"', '"0001-12-31"'],
        ['"8322-02-29"', '"2023-02-29"', '"1900-02-29"', '"2024-04-31"', '"0000-01-01"', '"2024-13-01"'],
    ),
    "date and pattern": (DATE | {"pattern": "^8"}, ['"8320-02-29"'], ['"8322-02-29"', '"2024-02-29"']),
    "date and pattern and more": (
        DATE | {"pattern": "^8", "allOf": [{"pattern": "29$"}]},
        ['"8320-02-29"'],
        ['"8322-02-29"', '"8320-02-28"', '"2024-02-29"'],
    ),
    "time": (DATE | {"format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2023-02-29T10:00:00Z"', '"2024-02-29"']),
} | {
    name: ({"type": "string", "format": name}, ['"a"'], ["1"])
    for name in ("byte", "binary", "password", "path", "regex")
}


@pytest.mark.parametrize("name", ZOD)
def test_schemas_of_zod_and_pydantic_are_taken(compiler, name):
    schema, wanted, unwanted = ZOD[name]
    schema = schema if "type" in schema else schema | {"type": "object"}
    grammar = compiler.compile(StructuredOutputsParams(json=schema), TOKENIZER)
    assert [text for text in wanted if not takes(grammar, text)] == []
    assert [text for text in unwanted if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, r'no grammar can hold "uniqueItems": leave it out'),
        ({"type": "string", "pattern": "(?=a)b"}, r"cannot look ahead or behind.*write out what may come"),
        ({"type": "string", "format": "iban"}, "leave the format out, or say it as a pattern"),
    ],
)
def test_what_no_grammar_can_hold_is_refused_with_what_to_do(compiler, schema, message):
    with pytest.raises(RequestError, match=message):
        compiler.compile(StructuredOutputsParams(json={"properties": {"a": schema}}), TOKENIZER)


@pytest.mark.parametrize(
    "given",
    [
        dict(json={"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}),
        dict(json_object=True),
        dict(
            structural_tag={
                "triggers": ["<f"],
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
            }
        ),
    ],
)
def test_blanks_between_the_parts_of_json_come_to_an_end(compiler, given):
    """Whoever wants nothing but blanks gets at most two line breaks and 64 blanks or tabs in one place."""
    grammar = compiler.compile(StructuredOutputsParams(**given), TOKENIZER)
    before = "<f>" if "structural_tag" in given else ""
    for blanks, is_taken in (
        ("\n\n" + " " * 64, True),
        (" \t" * 32, True),
        (" " * 65, False),
        ("\n\n\n", False),
        (" \n", False),
    ):
        matcher = grammar.initial.deep_copy()
        ids = TOKENIZER.encode(before + "{" + blanks)
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_taken, repr(blanks)
    other = StructuredOutputsParams(**given, whitespace_pattern=" *")
    assert takes_begin(compiler.compile(other, TOKENIZER), before + "{" + " " * 99)


def takes_begin(grammar, text):
    ids = TOKENIZER.encode(text)
    return grammar.initial.deep_copy().try_consume_tokens(ids) == len(ids)


def test_gbnf_is_read_where_it_harms_nobody_and_closing_waits_for_nothing(monkeypatch):
    """15,000 rules take llguidance's reader minutes: it has seconds of a CPU, in a process of its own."""
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(15_000))
    params = StructuredOutputsParams(grammar=f'root ::= r0\n{rules}\nr15000 ::= "b"')
    compiler = make_compiler()
    monkeypatch.setattr(compiler_module, "Trial", lambda *tokens: Trial(*tokens, limit_seconds=1.0))
    with pytest.raises(RequestError, match="takes more than 1 s to compile"):
        compiler.compile(params, TOKENIZER)
    assert compiler.knows(params) and not compiler.knows(StructuredOutputsParams(regex="a"))
    monkeypatch.undo()
    monkeypatch.setattr(trial_module, "_WAIT_SECONDS", 3600.0)  # an answer is never late: closing alone ends the wait
    compiler, said = make_compiler(), []
    compiler.compile(StructuredOutputsParams(regex="a"), TOKENIZER)
    process = compiler.trial.process

    def compile_slowly():
        with pytest.raises(RequestError) as caught:
            compiler.compile(params, TOKENIZER)
        said.append(str(caught.value))

    thread = threading.Thread(target=compile_slowly)
    os.kill(process.pid, signal.SIGSTOP)  # it will not answer
    thread.start()
    while not compiler.trial.is_busy:
        time.sleep(0.001)
    compiler.close()
    thread.join()
    assert "the engine was closed meanwhile" in said[0] and process.poll() is not None


def test_a_schema_has_its_own_seconds_whatever_came_before():
    trial, (good,) = Trial(["<call>"], VOCAB, limit_seconds=0.9), [grammar_of(StructuredOutputsParams(json=SCHEMA))]
    assert trial.fault(good) is None
    process = psutil.Process(trial.process.pid)
    while sum(process.cpu_times()[:2]) < 2.5:
        assert trial.fault(good) is None, "what others took counts"
    assert trial.process.pid == process.pid
    trial.close()


def test_added_tokens_that_are_letters_have_their_own_bytes():
    """As in DeepSeek's vocabularies: byte pairs spell byte 252 so."""
    tokenizer = make_structured_tokenizer()
    tokenizer.add_tokens([AddedToken("ü", normalized=False), AddedToken("ÿ", normalized=False)])
    compiler = GrammarCompiler(frozenset([tokenizer.convert_tokens_to_ids(END)]), len(tokenizer))
    grammar = compiler.compile(StructuredOutputsParams(json={"enum": ["für", "ÿ"]}), tokenizer)
    for text in ('"für"', '"ÿ"'):
        ids = tokenizer.encode(text)
        assert tokenizer.convert_tokens_to_ids(text[2] if "f" in text else text[1]) in ids
        matcher = grammar.initial.deep_copy()
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    for given in (dict(grammar="start: <call>"), dict(regex="x")):
        assert compiler.compile(StructuredOutputsParams(**given), tokenizer).initial.deep_copy().compute_bitmask()
    compiler.close()


def test_a_trigger_that_is_a_whole_tag_is_a_token_only_where_there_is_one(compiler):
    tag = {"schema": SCHEMA, "end": "</t>"}
    for name in ("<tool_call>", "<call>"):
        given = {"triggers": [name], "structures": [{"begin": name, **tag}]}
        grammar = compiler.compile(StructuredOutputsParams(structural_tag=given), TOKENIZER)
        assert takes(grammar, f'so {name}{{"b": 1}}</t>') and not takes(grammar, f'so {name}{{"c": 1}}</t>')
    both = {
        "triggers": ["<tool_call>", "<call>"],
        "structures": [{"begin": one, **tag} for one in ("<tool_call>", "<call>")],
    }
    with pytest.raises(RequestError, match="'<tool_call>' and '<call>' are a text and a special token"):
        compiler.compile(StructuredOutputsParams(structural_tag=both), TOKENIZER)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, r"structures\[0\].schema is one that no text fulfils"),
        ({"x-guidance": 5}, r"structures\[0\].schema has x-guidance 5: give an object"),
        ({"x-guidance": None}, r"structures\[0\].schema has x-guidance None: give an object"),
    ],
)
def test_a_schema_of_a_tag_that_cannot_be_is_refused(compiler, schema, message):
    tags = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]}
    with pytest.raises(RequestError, match=message):
        compiler.compile(StructuredOutputsParams(structural_tag=tags), TOKENIZER)


def test_a_grammar_whose_masks_take_ever_longer_ends_instead(compiler):
    """`s s` is read in as many ways as a text has parts, and all rows of a step wait for its mask."""
    grammar = compiler.compile(StructuredOutputsParams(grammar="start: s\ns: s s | /[a-z]/"), TOKENIZER)
    matcher, word = Matcher(grammar, [END_ID], 0), TOKENIZER.encode("a")
    assert {*word, END_ID} <= allowed(matcher, word * 50)
    with pytest.raises(ValueError, match="cannot go on from here .* give a simpler one"):
        allowed(matcher, word * 200)
