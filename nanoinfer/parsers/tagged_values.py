"""Grammars of arguments that stand between tags, each by itself: what is taken is what the reader makes of it.

A value is text as it is, if it may be a string, else JSON. Text that the reader would take for another type that the
schema allows is no string then, and no text has a tag that could end it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.parsers.branches import Unenforceable, branches, kinds_of, type_of
from nanoinfer.parsers.schema_types import json_of

_ANY = r"(.|\n)"
_BLANKS = r"[\s\x1c-\x1f]*"
# What `schema_types.json_of` takes for a value of each type, or might.
_LOOKS = {
    "null": "([nN][uU][lL][lL]|[nN][oO][nN][eE])",
    "boolean": "([tT][rR][uU][eE]|[fF][aA][lL][sS][eE])",
    "integer": r"-?[0-9]+",
    "number": r"-?[0-9][0-9.eE+\-]*",
    "object": rf"\{{{_ANY}*",
    "array": rf"\[{_ANY}*",
}
_WHOLE = "-?(0|[1-9][0-9]{0,17})"
_SCALARS = {
    "null": "null", "boolean": "true|false", "integer": _WHOLE,
    "number": rf"{_WHOLE}(\.[0-9]{{1,18}})?([eE][\-+]?[0-9]{{1,2}})?",
}  # fmt: skip
_STRUCTURES = frozenset(("object", "array"))
_LIMITS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_NAME = re.compile(r"[^\s<>]([^<>\r\n]{0,198}[^\s<>])?")
_MAX_LENGTH = 2000  # of a text whose length is limited
_OF_TEXTS = frozenset(("type", "enum", "minLength", "maxLength", "pattern"))
_OF_OTHERS = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf properties required additionalProperties items "
    "prefixItems minItems maxItems minProperties maxProperties patternProperties uniqueItems contains".split()
)
_OF_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"))


@dataclass(frozen=True)
class Value:
    """What stands between two tags.

    Attributes:
        texts: regular expressions between slashes, of which one holds for a text; none: it is no text.
        unlike: of what no text may be, or hold.
        scalars: of null, booleans and numbers beside texts.
        schema: of a value that is written as JSON; beside texts of objects and lists alone, for then the first
            character says which of the two it is. None: there is none.
        choices: texts, all that the value may be; None: it is told by the others.
    """

    texts: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    choices: tuple[str, ...] | None = None


def value_of(schema: Any, root: Mapping[str, Any], ends: Sequence[str]) -> Value:
    """Return what may stand between the tags of an argument.

    ends: tags that no text may hold.

    Raises:
        Unenforceable: the schema asks for what no grammar of such values can hold.
    """
    options = branches(schema, root)
    if not options:
        raise Unenforceable("no value fulfils it")
    kinds = frozenset().union(*(kinds_of(one) or {"string"} for one in options))
    if all("enum" in one for one in options):
        values = [value for one in options for value in one["enum"] if _holds(value, one)]
        texts = {value if isinstance(value, str) else json.dumps(value): value for value in values}
        kept = [text for text, value in texts.items() if _is_read_as(text, value, kinds)]
        kept = [text for text in kept if not any(end in text for end in ends)]
        if not kept:
            raise Unenforceable("its choices would be read as values of another type")
        return Value(choices=tuple(kept))
    texts, others, scalars = [], [], []
    beside_text = any(not (own := kinds_of(one)) or "string" in own for one in options)
    for one in options:
        own = kinds_of(one)
        if not own or "string" in own:
            _check(one, _OF_TEXTS if own == {"string"} else _OF_TEXTS | _OF_OTHERS)
            texts.append(_text(one))
        rest = sorted(own - {"string"})
        if beside_text and not set(rest) <= _STRUCTURES:
            limits = sorted(set(one) & _LIMITS)
            if limits and set(rest) & {"integer", "number"}:
                raise Unenforceable(f"{limits[0]!r} of a number that may be a string, too")
            if "enum" in one:
                scalars += [escaped(json.dumps(value)) for value in one["enum"] if type_of(value) in _SCALARS]
            else:
                scalars += [_SCALARS[kind] for kind in rest if kind in _SCALARS]
            rest = [kind for kind in rest if kind in _STRUCTURES]
        if rest:
            kept = {key: value for key, value in one.items() if key not in ("minLength", "maxLength", "pattern")}
            if "enum" in kept:
                kept["enum"] = [value for value in kept["enum"] if not isinstance(value, str)]
            others.append({**kept, "type": rest[0] if len(rest) == 1 else rest})
    schema = None
    if others:
        defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
        schema = {**defined, **(others[0] if len(others) == 1 else {"anyOf": others})}
    looks = [rf"{_BLANKS}{_LOOKS[kind]}{_BLANKS}" for kind in sorted(kinds - {"string"}) if texts]
    holds = [rf"{_ANY}*{escaped(end)}{_ANY}*" for end in ends if texts]
    return Value(tuple(texts), (*looks, *holds), tuple(scalars), schema)


def properties_of(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str], int, int | None]:
    """Return the arguments of a call, those that it must have, and how many at least and at most; None: any number.

    Raises:
        Unenforceable: a schema of more than properties.
    """
    options = branches(parameters, parameters)
    if len(options) != 1:
        raise Unenforceable("arguments that stand between tags have one object, without anyOf and oneOf")
    (one,) = options
    _check(one, _OF_ARGUMENTS)
    properties = dict(one.get("properties") or {})
    needed = [name for name in one.get("required") or () if isinstance(name, str)]
    others = one.get("additionalProperties", True)
    for name in needed:
        properties.setdefault(name, others)
    missing = [name for name in needed if properties[name] is False]
    if missing:
        raise Unenforceable(f"{json.dumps(missing[0])} is required, and no value is allowed for it")
    properties = {name: schema for name, schema in properties.items() if schema is not False}
    odd = [name for name in properties if not _NAME.fullmatch(name)]
    if odd:
        raise Unenforceable(f"the name {json.dumps(odd[0])}: give up to 200 characters without <, > and line ends")
    least, most = one.get("minProperties") or 0, one.get("maxProperties")
    if least > len(properties) or most is not None and most < max(least, len(set(needed))):
        raise Unenforceable(f"{least} to {len(properties) if most is None else most} properties cannot be given")
    return properties, frozenset(needed), least, None if most is None or most >= len(properties) else most


def escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.sub(r"([^\w\s<>\"':,=])", r"\\\1", text).replace("\n", "\\n")


def _check(branch: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(key for key in branch if key not in known)
    if unknown:
        raise Unenforceable(f"{unknown[0]!r} cannot be made to hold in the form in which this model writes arguments")


def _text(branch: Mapping[str, Any]) -> str:
    """Return a regular expression of the strings that a branch allows."""
    if "enum" in branch:
        return "|".join(escaped(value) for value in branch["enum"] if isinstance(value, str))
    least, most = branch.get("minLength", 0), branch.get("maxLength")
    if "pattern" in branch:
        if least or most is not None:
            raise Unenforceable("a pattern beside a length")
        return _pattern(branch["pattern"])
    if max(least, most or 0) > _MAX_LENGTH:
        raise Unenforceable(f"a length above {_MAX_LENGTH}")
    return f"{_ANY}{{{least},{'' if most is None else most}}}"


_WORD = {"d": "[0-9]", "w": "[A-Za-z0-9_]", "D": "[^0-9]", "W": "[^A-Za-z0-9_]", "s": r"[ \t\n\r]", "S": r"[^ \t\n\r]"}


def _pattern(pattern: Any) -> str:
    """Return a pattern of a schema, which holds for a part of a text, as one of whole texts."""
    if not isinstance(pattern, str) or re.search(r"\(\?[^:]|\\[bBk1-9pPuUxc]|\\$", pattern):
        raise Unenforceable(f"the pattern {json.dumps(pattern)}")
    body, begins, ends = pattern, pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = body[1:] if begins else body
    body = body[:-1] if ends else body
    if re.search(r"(?<!\\)(\\\\)*[$]|(?<![\\\[])(\\\\)*\^", body) or (
        "|" in body and (begins or ends) and not _is_group(body)
    ):
        raise Unenforceable(f"the pattern {json.dumps(pattern)}")
    inside = False
    parts = []
    for part in re.findall(r"\\.|[^\\]", body, flags=re.DOTALL):
        inside = part == "[" or inside and part != "]"
        if part[1:] in _WORD and len(part) == 2:
            if inside and part[1:] in "DWS":
                raise Unenforceable(f"the pattern {json.dumps(pattern)}")
            part = _WORD[part[1:]][1:-1] if inside else _WORD[part[1:]]
        parts.append("\\/" if part == "/" else "\\n" if part == "\n" else part)
    before, behind = ("" if begins else f"{_ANY}*"), ("" if ends else f"{_ANY}*")
    return f"{before}({''.join(parts)}){behind}"


def _is_group(body: str) -> bool:
    """Whether an alternative stands within one pair of parentheses, so that what is around it holds for all."""
    depth = 0
    for part in re.findall(r"\\.|[^\\]", body, flags=re.DOTALL):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return False
    return True


def _holds(value: Any, branch: Mapping[str, Any]) -> bool:
    """Whether a choice fulfils what else a branch says, as far as that is asked of choices: its type and its length."""
    kinds = kinds_of(branch)
    if kinds and type_of(value) not in kinds and not (type_of(value) == "integer" and "number" in kinds):
        return False
    if isinstance(value, str):
        if "pattern" in branch and not re.search(branch["pattern"], value):
            return False
        return branch.get("minLength", 0) <= len(value) <= branch.get("maxLength", len(value))
    unknown = set(branch) - {"type", "enum"}
    if unknown:
        raise Unenforceable(f"{sorted(unknown)[0]!r} beside choices")
    return True


def _is_read_as(text: str, value: Any, kinds: frozenset[str]) -> bool:
    """Whether the reader makes this value of the text."""
    if kinds == {"string"}:
        return True
    read = json.loads(json_of(text, kinds))
    return type(read) is type(value) and read == value
