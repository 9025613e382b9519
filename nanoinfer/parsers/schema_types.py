"""Values that are written without quotes and types: what a schema makes of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_MAX_NODES = 1000  # of a schema, looked at for one property
_MAX_LITERAL = 100_000  # characters
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][-+]?[0-9]{1,3})?")
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty: it does not say.

    Args:
        root: the schema in which its references lead somewhere.
    """
    found: set[str] = set()
    waiting, num_seen, seen_refs = [schema], 0, set()
    while waiting and num_seen < _MAX_NODES:
        one, num_seen = waiting.pop(), num_seen + 1
        if not isinstance(one, Mapping):
            continue
        kinds = one.get("type")
        found.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        if kinds is None:
            values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
            found.update(_NAMES.get(type(value), "null") for value in values)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(one.get(name), list):
                waiting += one[name]
        ref = one.get("$ref")
        if isinstance(ref, str) and ref not in seen_refs:
            seen_refs.add(ref)
            waiting.append(_referred(ref, root))
    return frozenset(found)


def property_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the types that one property of a tool's parameters may have."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return types_of(properties.get(name), parameters) if isinstance(properties, Mapping) else frozenset()


def _referred(ref: str, root: Any) -> Any:
    found = root
    for step in ref.removeprefix("#").strip("/").split("/")[:20]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


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
        if kind in types and bare.startswith(first) and (found := _structure(bare)) is not None:
            return found
    return quoted(text)


def _structure(text: str) -> str | None:
    """Return an object or a list as JSON, which may be written as in Python, too."""
    try:
        return json.dumps(json.loads(text, strict=False, parse_constant=_refuse), ensure_ascii=False)
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
