"""JSON Schemas as pydantic, zod and others write them, in the keywords that llguidance has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What says nothing that a grammar could follow: any string may be one.
_FREE_FORMATS = frozenset(("byte", "binary", "password", "path", "file-path", "directory-path", "regex"))
_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|{_YEAR}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|{_YEAR}-02-(0[1-9]|1[0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
# llguidance's own take the 29th of February of any year.
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}
# Keywords whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = frozenset("items additionalProperties contains not if then else propertyNames unevaluatedProperties".split())
_LIST = frozenset("anyOf allOf oneOf prefixItems".split())
_BY_NAME = frozenset("properties patternProperties $defs definitions dependentSchemas".split())


def to_supported(schema: Any) -> Any:
    """Return a schema that says the same in the keywords that grammars can be made of, where there are some.

    What has none stays as it is, and is refused by name when a grammar is made of it.
    """
    if isinstance(schema, list):  # `items` of older drafts
        return [to_supported(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    supported = {}
    for key, value in schema.items():
        if key in _SCHEMA:
            value = to_supported(value)
        elif key in _LIST and isinstance(value, list):
            value = [to_supported(one) for one in value]
        elif key in _BY_NAME and isinstance(value, Mapping):
            value = {name: to_supported(one) for name, one in value.items()}
        supported[key] = value
    if "not" in supported and supported["not"] in ({}, True):  # zod's `never`
        return False
    if supported.get("not") is False:
        del supported["not"]
    if supported.get("uniqueItems") is False:
        del supported["uniqueItems"]
    _take_format(supported)
    _take_names(supported)
    return supported


def _take_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if isinstance(name, str) and name in _FREE_FORMATS:
        del schema["format"]
    elif isinstance(name, str) and name in _PATTERNS:
        pattern = _PATTERNS[schema.pop("format")]
        if "pattern" not in schema:
            schema["pattern"] = pattern
        elif isinstance(schema.setdefault("allOf", []), list):  # both hold
            schema["allOf"].append({"pattern": pattern})


def _take_names(schema: dict[str, Any]) -> None:
    """Have an object's names say what `propertyNames` says: any text, one of some, or a pattern."""
    names = schema.get("propertyNames")
    if names in ({}, True) or isinstance(names, Mapping) and names.keys() <= {"type"}:
        del schema["propertyNames"]
        return
    rest = schema.get("additionalProperties", True)
    if not isinstance(names, Mapping) or "properties" in schema or "patternProperties" in schema:
        return
    if isinstance(names.get("enum"), list) and names.keys() <= {"type", "enum"}:
        kept = dict.fromkeys((name for name in names["enum"] if isinstance(name, str)), rest)
        schema |= dict(properties=kept, additionalProperties=False)
        del schema["propertyNames"]
    elif isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern"}:
        schema |= dict(patternProperties={names["pattern"]: rest}, additionalProperties=False)
        del schema["propertyNames"]


def remedy(reason: str) -> str:
    """Return what to do about a keyword that llguidance has not, behind its own words; "" where nothing is known."""
    if match := re.match(r"Unimplemented keys: \[(.*)\]", reason):
        return f": no grammar can hold {match[1]}: leave it out, and look at the answer yourself"
    if reason.startswith("Unknown format"):
        return ": leave the format out, or say it as a pattern"
    if "look-around" in reason:
        return ": a pattern cannot look ahead or behind, (?=...) or (?!...): write out what may come, or leave it out"
    return ""
