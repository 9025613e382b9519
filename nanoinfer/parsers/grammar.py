"""Grammars of calls, in llguidance's Lark: answers by one call tools as the model writes it, with arguments that fit.

A token that was added to a vocabulary is no text to llguidance, and is named by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanoinfer.common.tables import by_name
from nanoinfer.parsers.bare_values import BareValues
from nanoinfer.parsers.branches import Unenforceable
from nanoinfer.parsers.gemma4 import QUOTE
from nanoinfer.parsers.keyword_values import KeywordValues
from nanoinfer.parsers.tagged_values import escaped, properties_of, value_of
from nanoinfer.parsers.tools import Tool
from nanoinfer.structured.schemas import to_supported

# As templates write JSON, and so models: with blanks of any number some never end.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = r"/(.|\n)*/"
# What stands for more than itself in a shape, as a part of a rule.
_PLACED = {"{id}": "CALL_ID", "{maybe id}": r'(", \"id\": \"" CALL_ID "\"")?', "{maybe blank}": '" "?'}
FINAL, _PREAMBLE = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"  # of gpt-oss
_NEXT = "<|end|><|start|>assistant"
_PLACES = re.compile("(" + "|".join(map(re.escape, _PLACED)) + ")")


@dataclass(frozen=True)
class CallShape:
    """How a parser's calls are written around their arguments.

    Attributes:
        begin: with `{name}`; the first characters are those behind which a call follows. `{id}` is an id, `{maybe id}`
            a member "id" that may be there, `{maybe blank}` a blank.
        other_begin: another way to begin, which the model knows from its template.
        between: what stands between two calls; None: there is one call.
        first, last: what stands before the first call and behind the last one.
        value: of arguments that stand between tags, each by itself: the texts before the key, before and behind the
            value; None: the arguments are a JSON object.
        is_bare: the arguments are an object as `bare_values` has it.
        has_keywords: the arguments stand in a row, as Python has them, their values are JSON.
    """

    begin: str
    end: str
    between: str | None = "\n"
    first: str = ""
    last: str = ""
    value: tuple[str, str, str] | None = None
    is_bare: bool = False
    has_keywords: bool = False
    other_begin: str | None = None


_XML = ("<parameter=", ">\n", "\n</parameter>\n")
SHAPES: dict[str, CallShape] = by_name({
    "hermes": CallShape('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    "qwen3_coder qwen3_xml": CallShape("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", value=_XML),
    "seed_oss": CallShape(
        "<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>",
        value=("<parameter=", ">", "</parameter>\n"),
    ),
    "glm45 glm47": CallShape(
        "<tool_call>{name}\n", "</tool_call>", value=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    ),
    "gemma4": CallShape("<|tool_call>call:{name}", "<tool_call|>", "", is_bare=True),
    "llama3_json llama4_json": CallShape('{"name": "{name}", "parameters": ', "}", "; "),
    "mistral": CallShape("[TOOL_CALLS]{name}[ARGS]", "", ""),
    "mistral_id": CallShape("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]", "", ""),
    "mistral_list": CallShape(
        '{"name": "{name}", "arguments": ', "{maybe id}}", ", ", "[TOOL_CALLS]{maybe blank}[", "]"
    ),
    "lfm2": CallShape(
        "{name}(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", has_keywords=True
    ),
    "openai": CallShape(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", None,
        other_begin=" to=functions.{name}<|channel|>commentary json<|message|>",
    ),
})  # fmt: skip


class CallGrammar:
    """Writes the grammar of one request.

    Args:
        shape: how calls are written; None: there is none, but another form (`of_form`).
        token_ids: of all tokens that were added to the vocabulary, by their texts.
        thinking: the texts before and behind what is thought; None: nothing is.
        is_thinking: the prompt has the first of them already.
        must_call: an answer consists of calls. Else it is text in which there may be some.
        is_parallel: there may be several.
    """

    def __init__(
        self,
        shape: CallShape | None,
        token_ids: Mapping[str, int],
        thinking: tuple[str, str] | None = None,
        *,
        is_thinking: bool = False,
        must_call: bool = True,
        is_parallel: bool = True,
    ) -> None:
        self._shape, self._token_ids, self._thinking = shape, token_ids, thinking
        self._is_thinking, self._must_call, self._is_parallel = is_thinking, must_call, is_parallel
        names = sorted(filter(None, token_ids), key=len, reverse=True)
        self._added = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")
        self._ends: tuple[str, ...] = ()  # tags that no text may hold
        if shape is not None and shape.value is not None:
            self._ends = shape.value[2].strip(), shape.end.partition("\n")[0]
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules that several tools may have, by what they say

    def of(self, tools: Sequence[Tool], is_free: Callable[[Tool], bool] = lambda tool: False) -> str:
        """Return the grammar of calls of some tools; `is_free`: whose arguments may be any object."""
        shape, self._rules, self._names = self._shape, ["CALL_ID: /[a-zA-Z0-9]{9}/"], {}
        trigger, is_lazy = self._trigger(), False
        if not self._must_call and shape.between is not None:
            is_lazy = self._added.match(trigger) is None
        calls = []
        for index, tool in enumerate(tools):
            try:
                arguments = self._arguments(f"a{index}", {} if is_free(tool) else tool.parameters)
            except Unenforceable as error:
                error.tool = tool
                raise
            begins = [one.replace("{name}", tool.name) for one in (shape.begin, shape.other_begin) if one]
            if is_lazy and not shape.first:
                begins = [one.removeprefix(trigger) for one in begins]
            texts = " | ".join(map(self._text, begins))
            self._rules.append(f"c{index}: ({texts}) {arguments} {self._text(shape.end)}")
            calls.append(f"c{index}")
        self._rules.append("call: " + " | ".join(calls))
        several = shape.between is not None and self._is_parallel
        first, many = shape.first, "*" if several else "?"
        if is_lazy:
            first = first.removeprefix(trigger)
            self._rules.append(f"free[lazy]: /(.|\\n)*{escaped(trigger)}/")
        more = f" ({self._text(shape.between)} call)*" if several and (first or self._must_call) else ""
        said = f"{self._text(first)} call{more} {self._text(shape.last)}"
        if self._must_call:
            return self._grammar(f"{self._thought()} {said}")
        self._rules.append(f"TEXT: {_ANY}")
        if shape.between is None:
            preamble = f"({self._text(_PREAMBLE)} TEXT? {self._text(_NEXT)})?"
            return self._grammar(f"{self._thought()} {preamble} (call | {self._text(FINAL)} TEXT?)")
        if is_lazy:
            self._rules.append(f"TAIL: {_ANY} & ~/(.|\\n)*{escaped(trigger)}(.|\\n)*/")
            return self._grammar(f"{self._thought(tokens_only=True)} (free {said}){many} TAIL?")
        return self._grammar(f"{self._thought(tokens_only=True)} TEXT? ({said} TEXT?){many}")

    def of_form(self, before: str = "") -> str:
        """Return the grammar of what is thought, the text `before`, and what is called `@form`, another grammar."""
        self._rules = []
        thought = self._thought(blanks="\\n")  # which belong to what is thought; other blanks would be the answer's
        return self._grammar(f"{thought} {self._text(before)} @form")

    def _grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _trigger(self) -> str:
        """The text that no text but a call may have."""
        return (self._shape.first or self._shape.begin).partition("{")[0].strip() or '{"name": "'

    def _thought(self, *, tokens_only: bool = False, blanks: str = "[ \\n]") -> str:
        """What is thought before the answer. `tokens_only`: what stands between texts is part of the answer's text."""
        if self._thinking is None:
            return ""
        begin, end = self._thinking
        is_token = self._added.match(end) is not None
        if tokens_only and not (is_token and (self._is_thinking or self._added.match(begin))):
            return ""
        if is_token:
            inner = f"THOUGHT? {self._text(end)}"
            self._rules.append(f"THOUGHT: {_ANY}")
        else:
            inner = "thought"
            self._rules.append(f"thought[lazy]: /(.|\\n)*{escaped(end)}/")
        self._rules.append(f"BLANKS: /{blanks}{{1,4}}/")
        return f"{inner} BLANKS?" if self._is_thinking else f"({self._text(begin)} {inner} BLANKS?)?"

    def _rule(self, name: str, body: str, kind: str = "") -> str:
        """Add a rule, and return its name: that of another one, which says the same. Each has a limited number."""
        if kind + body not in self._names:
            self._names[kind + body] = name
            self._rules.append(f"{name}{kind}: {body}")
        return self._names[kind + body]

    def _arguments(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Add the rule of a tool's arguments, and return its name."""
        schema = dict(to_supported(parameters) or {})
        schema.setdefault("type", "object")
        schema.setdefault("x-guidance", _SPACES)
        if self._shape.is_bare:
            values = BareValues(self._rule, self._text, QUOTE in self._token_ids)
            return values.of(name, schema, schema)
        if self._shape.has_keywords:
            return KeywordValues(self._rule, _SPACES).of(name, schema)
        if self._shape.value is None:
            return self._rule(name, f"%json {json.dumps(schema)}")
        properties, needed, least, most = properties_of(schema)
        parts = {
            key: f"{self._text(before + key + middle)} {self._value(f'{name}v{index}', one, schema, behind)}"
            for index, (key, one) in enumerate(properties.items())
            for before, middle, behind in [self._shape.value]
        }
        if least <= len(needed) and most is None:
            return self._rule(
                name, " ".join(parts[key] if key in needed else f"({parts[key]})?" for key in parts) or '""'
            )
        return self._counted(name, [(part, key in needed) for key, part in parts.items()], least, most)

    def _counted(self, name: str, parts: Sequence[tuple[str, bool]], least: int, most: int | None) -> str:
        """Add rules of parts of which at least and at most so many come, those that must among them; return the first.

        There is one for each part and how many came before it.
        """
        most = len(parts) if most is None else most

        @cache
        def rest(index: int, count: int) -> str | None:
            still = sum(is_needed for _, is_needed in parts[index:])
            if count + still > most or count + len(parts) - index < least:
                return None
            if index == len(parts):
                return '""'
            part, is_needed = parts[index]
            ways = [f"{part} {taken}"] if (taken := rest(index + 1, count + 1)) is not None else []
            if not is_needed and (left := rest(index + 1, count)) is not None:
                ways.append(left)
            return self._rule(f"{name}n{index}with{count}", " | ".join(ways)) if ways else None

        rule = rest(0, 0)
        if rule is None:
            raise Unenforceable("its properties cannot be as many as it asks for")
        return rule

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any], behind: str) -> str:
        """Add the rule of a value between tags, and return its name: strings as they are, other types as JSON."""
        value, tail = value_of(schema, root, self._ends), self._text(behind)
        if value.choices is not None:
            return self._rule(rule, f"({' | '.join(map(json.dumps, value.choices))}) {tail}")
        ways = []
        if value.texts:
            unlike = "".join(f" & ~/{one}/" for one in value.unlike)
            text = f"(/({'|'.join(value.texts)})/{unlike})"
            text = " | ".join([text, *(f"/{one}/" for one in value.scalars)])
            if self._added.search(behind):  # text cannot have such tokens
                may_be_empty = any(re.fullmatch(one, "") for one in value.texts)
                ways.append(f"{self._rule(rule.upper(), text)}{'?' * may_be_empty} {tail}")
            else:
                ways.append(self._rule(rule.upper(), f"({text}) {json.dumps(behind)}"))
        if value.schema is not None:
            made = {"x-guidance": _SPACES, **value.schema}
            ways.append(f"{self._rule(f'{rule}j', f'%json {json.dumps(made)}')} {tail}")
        return self._rule(rule, " | ".join(ways))

    def _text(self, text: str) -> str:
        """Return a text as a part of a rule, tokens that were added by their ids."""
        terms = []
        for piece in _PLACES.split(text):
            parts = [part for part in self._added.split(piece) if part] if piece not in _PLACED else []
            terms += [f"<[{self._token_ids[one]}]>" if one in self._token_ids else json.dumps(one) for one in parts]
            terms += [_PLACED[piece]] if piece in _PLACED else []
        return " ".join(terms)


def tool_at(grammar: str, line: int) -> int | None:
    """Return the index of the tool whose rule stands in a line of a grammar, counted from 1; None: no tool's."""
    match = re.match(r"[ac](\d+)", grammar.splitlines()[line - 1])
    return None if match is None else int(match[1])
