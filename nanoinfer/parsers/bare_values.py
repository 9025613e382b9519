"""Grammars of arguments as Gemma 4 writes them: keys without quotes, texts between marks, all else as in JSON.

Members of an object come in the order of their keys, as the model's template has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from nanoinfer.parsers.branches import Unenforceable, branches, kinds_of
from nanoinfer.parsers.gemma4 import QUOTE
from nanoinfer.parsers.tagged_values import escaped, value_of

_PLAIN_KEY = re.compile(r"[^:,{}\[\]<\s]([^:,{}\[\]<\n]*[^:,{}\[\]<\s])?")
_KEY = r"/[^:,{}\[\]<\n]+/"
_NULL = '("null" | "None")'  # as the template writes it
_NUMBERS = frozenset(("integer", "number"))
_OF_LISTS = frozenset(("type", "items", "minItems", "maxItems"))
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_OF_TEXTS = frozenset(("type", "minLength", "maxLength", "pattern"))
_OF_NUMBERS = frozenset("type minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_KNOWN = _OF_LISTS | _OF_OBJECTS | _OF_TEXTS | _OF_NUMBERS


class BareValues:
    """Adds the rules of values to a grammar.

    Args:
        rule: adds a rule of a name and a body, and returns the name of one that says the same.
        text: returns a text as a part of a rule.
        is_token: whether the mark around texts is a token of its own, which no text has.
    """

    def __init__(self, rule: Callable[[str, str], str], text: Callable[[str], str], is_token: bool) -> None:
        self._rule, self._quote, self._is_token = rule, text(QUOTE), is_token

    def of(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Add the rules of a value that fulfils a schema, and return the name of the first.

        Raises:
            Unenforceable: the schema asks for what is not written here.
        """
        options = branches(schema, root)
        if not options:
            raise Unenforceable("no value fulfils it")
        ways: dict[str, None] = {}
        for number, one in enumerate(options):
            own = f"{name}o{number}" if len(options) > 1 else name
            if "enum" in one:
                ways |= dict.fromkeys(self._choice(value) for value in one["enum"])
                continue
            if unknown := sorted(set(one) - _KNOWN):
                raise Unenforceable(f"{unknown[0]!r} cannot be made to hold in the form in which this model writes")
            for kind in sorted(kinds_of(one)) or [None]:
                ways[self._of_kind(own, kind, one, root)] = None
        return self._rule(name, " | ".join(ways))

    def _of_kind(self, name: str, kind: str | None, one: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        if kind is None:
            return self._any()
        if kind == "string":
            return self._string(name, one)
        if kind in _NUMBERS:
            limits = {key: value for key, value in one.items() if key in _OF_NUMBERS}
            return self._rule(f"{name}n", f"%json {json.dumps({**limits, 'type': kind})}")
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return _NULL
        return self._list(name, one, root) if kind == "array" else self._object(name, one, root)

    def _choice(self, value: Any) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                raise Unenforceable(f"a choice with {QUOTE}")
            return f"{self._quote} {json.dumps(value) if value else ''} {self._quote}"
        if isinstance(value, list | dict):
            raise Unenforceable("choices that are lists or objects")
        return _NULL if value is None else json.dumps(json.dumps(value))

    def _string(self, name: str, one: Mapping[str, Any]) -> str:
        own = {key: value for key, value in one.items() if key in _OF_TEXTS}
        (text,) = value_of({**own, "type": "string"}, {}, ()).texts
        return self._between_marks(f"{name}t".upper(), text)

    def _list(self, name: str, one: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        item = self.of(f"{name}i", one["items"], root) if "items" in one else self._any()
        least, most = one.get("minItems", 0), one.get("maxItems")
        if most == 0:
            return '"[" "]"'
        count = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){count}'
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, name: str, one: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        properties, others = dict(one.get("properties") or {}), one.get("additionalProperties", True)
        needed = {key for key in one.get("required") or () if isinstance(key, str)}
        for key in needed:
            properties.setdefault(key, others)
        properties = {key: schema for key, schema in properties.items() if schema is not False or key in needed}
        if not properties:
            if others is False:
                return '"{" "}"'
            value = self._any() if others is True or others == {} else self.of(f"{name}a", others, root)
            return self._members(value)
        keys = sorted(properties, key=str.lower)
        members = [f"{self._key(key)} {self.of(f'{name}p{at}', properties[key], root)}" for at, key in enumerate(keys)]

        @cache
        def rest(at: int, has_come: bool) -> str:
            """Return what may come from this member on, with members before it or without."""
            if at == len(keys):
                return '""'
            way = f"{comma * has_come}{members[at]} {rest(at + 1, True)}"
            body = way if keys[at] in needed else f"{way} | {rest(at + 1, has_come)}"
            return self._rule(f"{name}m{at}{'b' * has_come}", body)

        comma = '"," '
        first_needed = next((at for at, key in enumerate(keys) if key in needed), len(keys))
        for at in reversed(range(1, len(keys))):  # from the end, so that many members are no deep recursion
            rest(at, True)
            if at <= first_needed:
                rest(at, False)
        return f'"{{" {rest(0, False)} "}}"'

    def _key(self, key: str) -> str:
        if QUOTE in key:
            raise Unenforceable(f"a property with {QUOTE}")
        if _PLAIN_KEY.fullmatch(key):
            return json.dumps(f"{key}:")
        return f'{self._quote} {json.dumps(key) if key else ""} {self._quote} ":"'

    def _members(self, value: str) -> str:
        key = f"({self._rule('GKEY', _KEY)}? | {self._text()})"
        return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'

    def _any(self) -> str:
        """Return the name of the rule of any value."""
        number = self._rule("gnumber", '%json {"type": "number"}')
        inner = [self._text(), number, '"true"', '"false"', _NULL]
        inner += [self._members("gany"), '"[" (gany ("," gany)*)? "]"']
        return self._rule("gany", " | ".join(inner))

    def _text(self) -> str:
        return self._between_marks("GTEXT", r"(.|\n)*")

    def _between_marks(self, name: str, text: str) -> str:
        """text: a regular expression."""
        if self._is_token:
            may_be_empty = re.fullmatch(text, "") is not None
            return f"{self._quote} {self._rule(name, f'/{text}/')}{'?' * may_be_empty} {self._quote}"
        # As one with the text: it would take the begin of the mark for more of the text.
        unlike = rf"/(.|\n)*{escaped(QUOTE)}(.|\n)*/"
        return f"{self._quote} {self._rule(name, f'(/{text}/ & ~{unlike}) {self._quote}')}"
