"""StructuredOutputsParams: the form that a completion must have, with vLLM's names and meanings."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from nanoinfer.common.errors import UnknownNameError, shown, unknown
from nanoinfer.common.unsupported import STRUCTURED, check_keywords

MAX_CHARS = 2**20
"""Most characters of a schema, a grammar, tags or all choices together."""
MAX_REGEX_CHARS = 2**15
"""Most characters of a regular expression: the time that each mask takes grows with it."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_EXAMPLE = 'structured_outputs=StructuredOutputsParams(json={"type": "object"})'


@partial(check_keywords, table=STRUCTURED, taker="StructuredOutputsParams")
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a completion must look like, from its first token (in chats, behind what is thought) to its end: exactly one
    of the first six fields.

    Raises:
        UnknownNameError: a keyword is not a field; the message names the nearest field.
        ValueError: none of the kinds is given, or several, or what is given cannot be read. What can be read and not be
            generated is refused when a request is made of it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON Schema that the text fulfils, as an object or as text. Properties come in its order. Kept as text."""
    regex: str | None = None
    """A regular expression that the whole text matches, in the syntax of Rust's `regex`: no references back."""
    choice: Iterable[str] | None = None
    """The texts of which one comes. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar, in llama.cpp's GBNF (with ::=) or in llguidance's Lark, whose first rule is `root` or
    `start`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text in which each of `triggers` begins one of `structures`, which has a `begin`, a `schema` and an `end`.
    An object or text; kept as text."""
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks, with `json`, `json_object` and `structural_tag`."""
    disable_additional_properties: bool = False
    """Only the properties that a schema names, where it does not say `additionalProperties` itself."""
    whitespace_pattern: str | None = None
    """What may stand between the parts of JSON, as a regular expression; None: spaces and line breaks."""
    before: str | None = field(default=None, init=False, repr=False)
    """What comes before it, set by `behind`; None: nothing."""

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties", "json_object"):
            if not isinstance(getattr(self, name) or False, bool):
                raise ValueError(_wrong(name, getattr(self, name), "True or False"))
        object.__setattr__(self, "json_object", self.json_object or None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "says nothing"
            raise ValueError(f"structured_outputs {found}: give one of {', '.join(_KINDS)}, as in {_EXAMPLE}")
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None and not (isinstance(text, str) and text):
                raise ValueError(_wrong(name, text, "a text that is not empty"))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.is_json:
            if self.disable_any_whitespace and self.whitespace_pattern is not None:
                raise ValueError(
                    "structured_outputs has disable_any_whitespace=True and whitespace_pattern: give one of them"
                )
        else:
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
                if getattr(self, name):
                    raise ValueError(f"structured_outputs.{name} goes with JSON, not with {given[0]}: leave it out")
        most = MAX_REGEX_CHARS if self.regex else MAX_CHARS
        if self.num_chars > most:
            raise ValueError(
                f"structured_outputs.{given[0]} has {self.num_chars} characters, {most} are possible: give fewer"
            )

    def behind(self, before: str | None) -> StructuredOutputsParams:
        """Return a copy for a text that begins with something else.

        before: a grammar of llguidance in Lark, in which `@form` stands for what these parameters ask for; None:
            nothing comes before it.
        """
        made = copy.copy(self)
        object.__setattr__(made, "before", before)
        return made

    @property
    def kind(self) -> str:
        """The name of the one field that says what comes: json, regex, choice, grammar, json_object, structural_tag."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def num_chars(self) -> int:
        """How long what was given is."""
        given = getattr(self, self.kind)
        return sum(map(len, given if isinstance(given, tuple) else (given,) if isinstance(given, str) else ()))

    @property
    def is_json(self) -> bool:
        """Whether JSON comes, so that it matters what may stand between its parts."""
        return self.kind in ("json", "json_object", "structural_tag")


def checked(given: Any) -> StructuredOutputsParams | None:
    """Return what `SamplingParams.structured_outputs` was given, as an object or a dict of its fields.

    Raises: as `StructuredOutputsParams`.
    """
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"structured_outputs is {shown(given)}: give {_EXAMPLE}, or a dict of its fields")
    names = [one.name for one in fields(StructuredOutputsParams) if one.init]
    for name in given:
        if name not in names and name not in STRUCTURED:
            raise UnknownNameError(unknown("structured_outputs has an unknown field", str(name), names))
    return StructuredOutputsParams(**given)


def _wrong(name: str, given: Any, allowed: str) -> str:
    return f"structured_outputs.{name} is {shown(given)}: it must be {allowed}"


def _json_text(name: str, given: Any) -> str:
    """Return an object, or the text of one, as text. A schema may also be true or false."""
    allowed = "a JSON Schema: an object, or the text of one" if name == "json" else "an object, or the text of one"
    try:
        value = json.loads(given) if isinstance(given, str) else given
        text = given if isinstance(given, str) else json.dumps(dict(given) if isinstance(given, Mapping) else given)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{_wrong(name, given, allowed)} ({reason})") from None
    if not isinstance(value, Mapping) and not (name == "json" and isinstance(value, bool)):
        hint = f"; give {given.__name__}.model_json_schema()" if hasattr(given, "model_json_schema") else ""
        raise ValueError(_wrong(name, value, allowed) + hint)
    return text


def _choices(given: Any) -> tuple[str, ...]:
    allowed = "a list of texts, none of them empty"
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ValueError(_wrong("choice", given, allowed))
    choices = tuple(dict.fromkeys(given))
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValueError(_wrong("choice", list(choices), f"{allowed}; {choice!r} is none"))
    if not choices:
        raise ValueError(_wrong("choice", [], allowed))
    return choices
