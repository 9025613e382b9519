"""Grammars of arguments in a row, `key=value, key=value`: values as JSON, and texts, truths and nothing as Python too.

Arguments come in the order of their keys in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from nanoinfer.parsers.branches import Unenforceable, branches, kinds_of
from nanoinfer.parsers.tagged_values import properties_of

_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_NAME = re.compile(r"[^\W\d][\w\-]*")
_QUOTED = r"""/'([^'\\]|\\['"\\nrt])*'/"""
_LIMITS = ("enum", "minLength", "maxLength", "pattern")


class KeywordValues:
    """Adds the rules of arguments to a grammar.

    Args:
        rule: adds a rule of a name and a body, and returns the name of one that says the same.
        spaces: how JSON is spaced, for llguidance.
    """

    def __init__(self, rule: Callable[[str, str], str], spaces: Mapping[str, Any]) -> None:
        self._rule, self._spaces = rule, spaces

    def of(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Add the rules of arguments that fulfil a schema, and return the name of the first.

        Raises:
            Unenforceable: the schema asks for what is not written here.
        """
        properties, needed, least, most = properties_of(parameters)
        if least > len(needed) or most is not None:
            raise Unenforceable("a number of arguments cannot be made to hold in the form in which this model writes")
        if not properties:
            return self._rule(name, '""') if parameters.get("additionalProperties") is False else self._any(name)
        if odd := [key for key in properties if not _NAME.fullmatch(key)]:
            raise Unenforceable(f"the name {json.dumps(odd[0])}: give letters, digits, _ and -, no digit first")
        keys = list(properties)
        members = [
            f"{json.dumps(key + '=')} {self._value(f'{name}p{at}', properties[key], parameters)}"
            for at, key in enumerate(keys)
        ]

        @cache
        def rest(at: int, has_come: bool) -> str:
            """Return what may come from this argument on, with some before it or without."""
            if at == len(keys):
                return '""'
            comma = '", " ' if has_come else ""
            way = f"{comma}{members[at]} {rest(at + 1, True)}"
            body = way if keys[at] in needed else f"{way} | {rest(at + 1, has_come)}"
            return self._rule(f"{name}m{at}{'b' * has_come}", body)

        for at in reversed(range(1, len(keys))):  # from the end, so that many arguments are no deep recursion
            rest(at, True)
        return self._rule(name, rest(0, False))

    def _any(self, name: str) -> str:
        member = f'{self._rule("KEYWORD", _KEY)} "=" {self._value("kany", {}, {})}'
        return self._rule(name, f'({member} (", " {member})*)?')

    def _value(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        options = branches(schema, root)
        if not options:
            raise Unenforceable("no value fulfils it")
        defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
        made = {**defined, **(schema if isinstance(schema, Mapping) else {}), "x-guidance": self._spaces}
        ways = {self._rule(f"{name}j", f"%json {json.dumps(made)}"): None}
        for one in options:
            kinds = kinds_of(one)
            if "enum" in one:
                texts = [text for text in one["enum"] if isinstance(text, str) and not re.search(r"['\\\n]", text)]
                ways |= dict.fromkeys(json.dumps(f"'{text}'", ensure_ascii=False) for text in texts)
                continue
            if (not kinds or "string" in kinds) and not any(limit in one for limit in _LIMITS):
                ways[self._rule("QUOTED", _QUOTED)] = None
            if not kinds or "boolean" in kinds:
                ways['("True" | "False")'] = None
            if not kinds or "null" in kinds:
                ways['"None"'] = None
        return self._rule(name, " | ".join(ways))
