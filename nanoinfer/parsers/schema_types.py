"""Values that are written without quotes and types: what a schema makes of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from nanoinfer.parsers.branches import Unenforceable, branches, kinds_of

_MAX_LITERAL = 100_000  # characters
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][-+]?[0-9]{1,300})?")


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty: it does not say.

    Args:
        root: the schema in which its references lead somewhere.
    """
    try:
        kinds = [kinds_of(one) for one in branches(schema, root)]
    except (Unenforceable, TypeError, AttributeError, RecursionError):  # of what no grammar was made
        return frozenset()
    return frozenset().union(*(one or {"string"} for one in kinds)) if any(kinds) else frozenset()


def property_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the types that one property of a tool's parameters may have."""
    try:
        (one,) = branches(parameters, parameters)
    except (Unenforceable, TypeError, AttributeError, RecursionError, ValueError):
        one = parameters if isinstance(parameters, Mapping) else {}
    properties = one.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], parameters)
    return types_of(one.get("additionalProperties"), parameters)


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of these types is a string, whatever its text is."""
    return not types or types == {"string"}


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as plain text: a string where no other type fits."""
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"integer", "number"} and (number := _NUMBER.fullmatch(bare)):
        if "number" in types or not (number[1] or number[2]):
            return bare
    for kind, first in (("object", "{"), ("array", "[")):
        if kind in types and bare.startswith(first) and (structure := _structure(bare)) is not None:
            return structure
    return quoted(text)


def _structure(text: str) -> str | None:
    """Return an object or a list as JSON, which may be written as in Python, too."""
    for strict in (True, False):
        try:
            value = json.loads(text, strict=strict, parse_constant=_refuse)
            # What is JSON stays as it is: a number may be one that no float has.
            return text if strict else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    try:
        value = ast.literal_eval(text) if len(text) <= _MAX_LITERAL else None
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, list | dict) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
