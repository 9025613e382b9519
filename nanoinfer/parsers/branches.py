"""What a JSON Schema allows, as plain branches: references followed, `allOf` merged, `anyOf` and `oneOf` laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_BRANCHES = 200
_MAX_DEPTH = 50
# What says nothing of a value.
_NOTES = frozenset(
    "title description default examples $comment deprecated readOnly writeOnly $defs definitions $schema $id format "
    "contentEncoding contentMediaType x-guidance".split()
)
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_TIGHTER = {
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max, "minProperties": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min, "maxProperties": min,
}  # fmt: skip


class Unenforceable(ValueError):
    """What a schema says cannot be made to hold.

    tool: whose arguments it is about, once that is known.
    """

    tool: Any = None


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "null")


def branches(schema: Any, root: Any, *, seen: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return schemas of which a value must fulfil one: without references, `allOf`, `anyOf` and `oneOf`.

    What only describes is left out. A branch without "type" and "enum" says nothing of the type; none: no value fits.

    Args:
        root: the schema in which references lead somewhere.

    Raises:
        Unenforceable: it refers to itself, branches of a `oneOf` overlap, or there are too many.
    """
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return [{}]
    own = {key: value for key, value in schema.items() if key not in _NOTES}
    if "const" in own:
        own["enum"] = _both_enums(own.get("enum"), [own.pop("const")])
    schemas = [own]
    ref = own.pop("$ref", None)
    several = [own.pop(key) for key in ("allOf",) if isinstance(own.get(key), list)]
    choices = [(key, own.pop(key)) for key in ("anyOf", "oneOf") if isinstance(own.get(key), list)]
    if isinstance(ref, str):
        if ref in seen or len(seen) > _MAX_DEPTH:
            raise Unenforceable(f"{ref} refers to itself")
        schemas = _combine(schemas, branches(resolve(ref, root), root, seen=(*seen, ref)))
    for one in several[0] if several else ():
        schemas = _combine(schemas, branches(one, root, seen=seen))
    for key, options in choices:
        made = [branches(one, root, seen=seen) for one in options]
        if key == "oneOf":
            _check_apart(made)
        schemas = _combine(schemas, [branch for one in made for branch in one])
    return [one for one in schemas if one.get("type", ["any"]) and one.get("enum", ["any"])]


def kinds_of(branch: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a branch allows; empty: it does not say."""
    kinds = branch.get("type")
    if kinds is not None:
        return frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    return frozenset(map(type_of, branch["enum"])) if "enum" in branch else frozenset()


def resolve(ref: str, root: Any) -> Any:
    """Return what a reference within a schema leads to; None: nothing is there."""
    part = root
    for step in ref.removeprefix("#").strip("/").split("/")[:20]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def fits_type(value: Any, kinds: frozenset[str]) -> bool:
    """Whether a value is of one of these types; of none given, every one is."""
    kind = type_of(value)
    is_whole = kind == "number" and value == int(value) if isinstance(value, float) and abs(value) < 1e15 else False
    return not kinds or kind in kinds or kind == "integer" and "number" in kinds or is_whole and "integer" in kinds


def _combine(left: list[dict], right: list[dict]) -> list[dict]:
    pairs = [merged for one in left for other in right if (merged := _merge(one, other)) is not None]
    if len(pairs) > _MAX_BRANCHES:
        raise Unenforceable(f"it has more than {_MAX_BRANCHES} branches")
    return pairs


def _merge(one: dict, other: dict) -> dict | None:
    """Return a schema that says what both say; None: no value fulfils both."""
    merged = {**one, **other}
    kinds, others = kinds_of(one), kinds_of(other)
    if kinds and others:
        both = {kind for kind in kinds | others if _has(kinds, kind) and _has(others, kind)}
        if not both:
            return None
        merged["type"] = sorted(both)
    if "enum" in one and "enum" in other:
        merged["enum"] = _both_enums(one["enum"], other["enum"])
    if "enum" in merged:
        allowed = kinds_of({"type": merged["type"]}) if "type" in merged else frozenset()
        merged["enum"] = [value for value in merged["enum"] if fits_type(value, allowed)]
        if not merged["enum"]:
            return None
    for key in (one.keys() & other.keys()) - {"type", "enum"}:
        if key in _TIGHTER:
            merged[key] = _TIGHTER[key](one[key], other[key])
        elif key == "required":
            merged[key] = [*dict.fromkeys([*one[key], *other[key]])]
        elif key == "properties":
            merged[key] = {
                name: {"allOf": [part[name] for part in (one[key], other[key]) if name in part]}
                for name in {**one[key], **other[key]}
            }
        elif one[key] != other[key]:
            merged.setdefault("allOf", []).append({key: one[key]})
    return merged


def _has(kinds: frozenset[str], kind: str) -> bool:
    return kind in kinds or kind == "integer" and "number" in kinds


def _both_enums(one: Any, other: list) -> list:
    if not isinstance(one, list):
        return other
    texts = {json.dumps(value, sort_keys=True) for value in one}
    return [value for value in other if json.dumps(value, sort_keys=True) in texts]


def _check_apart(made: list[list[dict]]) -> None:
    """Raise Unenforceable if a value may fulfil two of several schemas."""
    for index, one in enumerate(made):
        for other in made[index + 1 :]:
            if any(_merge(left, right) is not None for left in one for right in other):
                raise Unenforceable(
                    "branches of a oneOf may hold for one value: give anyOf, or branches of other types"
                )
