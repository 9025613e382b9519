"""JSON as it comes: where a value ends, and the call of a tool that is written as an object."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_BLANK = re.compile(r"[ \t\n\r]*")
_RUN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_ATOM_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_MAX_ATOM = 400  # characters of a number
MAX_DEPTH = 500  # of what is given on; clients read it with parsers that recurse


class JsonValue:
    """One JSON value, read from the beginning to where it ends.

    A line end or another control character in a string, which models write and JSON has not, is given on as its escape.

    Attributes:
        is_whole: it has ended. A number at the top has only where something else follows.
        is_wrong: it is no JSON; what makes it wrong is not taken.
    """

    def __init__(self) -> None:
        self.is_whole = self.is_wrong = False
        self._closers: list[str] = []
        self._wants = "value"
        self._in_string = False
        self._part = ""  # of an escape, an atom, or what else is not known to be whole
        self._undrained: list[str] = []

    def take(self, text: str, at: int) -> int:
        """Read from a position in a text; return the position behind what belongs to the value."""
        while at < len(text) and not (self.is_whole or self.is_wrong):
            at = self._string(text, at) if self._in_string else self._other(text, at)
        return at

    def drain(self) -> str:
        """Return what was read since the last call."""
        text, self._undrained = "".join(self._undrained), []
        return text

    def rest(self) -> str:
        """Return what was read and is not known to be right yet: the begin of a number or of an escape."""
        return self._part

    @property
    def is_in_string(self) -> bool:
        return self._in_string and not self.is_wrong

    def _string(self, text: str, at: int) -> int:
        if self._part:
            self._part += text[at]
            if _ESCAPE.fullmatch(self._part):
                self._undrained.append(self._part)
                self._part = ""
            elif not _ESCAPE_BEGUN.fullmatch(self._part):
                self.is_wrong = True
                self._undrained.append(self._part[:-1])
                return at
            return at + 1
        end = _RUN.match(text, at).end()
        self._undrained.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == "\\":
            self._part = "\\"
        elif text[end] == '"':
            self._undrained.append('"')
            self._in_string = False
            self._ended()
        else:
            self._undrained.append(json.dumps(text[end])[1:-1])
        return end + 1

    def _other(self, text: str, at: int) -> int:
        if self._part:
            end = _ATOM_CHARS.match(text, at).end()
            self._part += text[at:end]
            if end < len(text) or len(self._part) > _MAX_ATOM:
                self._end_atom()
            return end
        end = _BLANK.match(text, at).end()
        self._undrained.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if self._wants.startswith("value") and _ATOM_CHARS.match(char).end():
            self._part = char
            return end + 1
        self._sign(char)
        if self.is_wrong:
            return end
        self._undrained.append(char)
        return end + 1

    def _sign(self, char: str) -> None:
        wants = self._wants
        if char == '"' and (wants.startswith("value") or wants.startswith("key")):
            self._in_string = True
        elif char in "{[" and wants.startswith("value") and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._wants = "key or end" if char == "{" else "value or end"
        elif self._closers and char == self._closers[-1] and wants.endswith("end"):
            self._closers.pop()
            self._wants = "value"
            self._ended()
        elif char == "," and wants == "comma or end":
            self._wants = "key" if self._closers[-1] == "}" else "value"
        elif char == ":" and wants == "colon":
            self._wants = "value"
        else:
            self.is_wrong = True

    def _end_atom(self) -> None:
        self._undrained.append(self._part)
        self.is_wrong = not _ATOM.fullmatch(self._part)
        self._part = ""
        if not self.is_wrong:
            self._ended()

    def _ended(self) -> None:
        """A key or a value has ended."""
        if self._wants.startswith("key"):
            self._wants = "colon"
        elif self._closers:
            self._wants = "comma or end"
        else:
            self.is_whole = True


class JsonCall:
    """A call that is written as an object: its name is in "name", its arguments are in "arguments" or "parameters".

    Attributes:
        name: None: it has not come yet.
        is_whole: the object has ended. What models forget, the last brace, the reader of the call forgives.
        is_wrong: it is no JSON, or no call.
    """

    _ARGUMENTS = ("arguments", "parameters")

    def __init__(self, keys: Collection[str] | None = None) -> None:
        """keys: an object with others is no call, and "function" may have the name, too; None: any may be there."""
        self._keys = keys
        self.name: str | None = None
        self.is_whole = self.is_wrong = self.has_arguments = False
        self._wants = "{"
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._parts: list[str] = []  # of a value that is not given on as it comes
        self._is_passed = False
        self._ready: list[str] = []  # arguments that were not given on yet

    def take(self, text: str, at: int) -> int:
        """Read from a position in a text; return the position behind what belongs to the object."""
        while at < len(text) and not (self.is_whole or self.is_wrong):
            at = self._sign(text, at) if self._value is None else self._part(text, at)
        return at

    def arguments(self) -> str:
        """Return the arguments that came since the last call; "" until the name is known."""
        if self.name is None:
            return ""
        text, self._ready = "".join(self._ready), []
        return text

    def rest(self) -> str:
        """Return what was read of the arguments and is not known to be right yet."""
        return self._value.rest() if self._value is not None and self._is_passed else ""

    @property
    def is_between(self) -> bool:
        """Whether nothing but the end of the object is missing."""
        return self._value is None and self._wants in (", or }", '" or }')

    def end(self) -> None:
        """The object ends here, whole or not; without arguments it has none."""
        if self.name is None or not (self.is_whole or self.is_between):
            self.is_wrong = True
        elif not self.has_arguments:
            self.has_arguments = True
            self._ready.append("{}")

    def _sign(self, text: str, at: int) -> int:
        at = _BLANK.match(text, at).end()
        if at == len(text):
            return at
        char, wants = text[at], self._wants
        if char == "{" and wants == "{":
            self._wants = '" or }'
        elif char == '"' and wants.startswith('"') or wants == "value":
            self._value, self._parts = JsonValue(), []
            self._is_passed = wants == "value" and self._key in self._ARGUMENTS and char == "{"
            self.is_wrong = self._is_passed and self.has_arguments  # a second time
            self.has_arguments |= self._is_passed
            return at
        elif char == ":" and wants == ":":
            self._wants = "value"
        elif char == "," and wants == ", or }":
            self._wants = '"'
        elif char == "}" and wants.endswith("}"):
            self.is_whole = True
            self.end()
        else:
            self.is_wrong = True
            return at
        return at + 1

    def _part(self, text: str, at: int) -> int:
        value = self._value
        end = value.take(text, at)
        piece = value.drain()
        if self._is_passed:
            self._ready.append(piece)
        else:
            self._parts.append(piece)
        if value.is_wrong:
            self.is_wrong = True
        elif value.is_whole:
            if not self._is_passed:
                self._take_value(json.loads("".join(self._parts)))
            self._value = None
            self._wants = ":" if self._wants.startswith('"') else ", or }"
        return end

    def _take_value(self, value: Any) -> None:
        if self._wants.startswith('"'):
            self._key = value
            self.is_wrong = self._keys is not None and value not in self._keys
        elif self._key == "name" or self._key == "function" and self._keys is not None:
            self.is_wrong = not isinstance(value, str) or not value or self.name is not None
            self.name = self.name if self.is_wrong else value
        elif self._key in self._ARGUMENTS and value is not None:
            text = object_text(value) if isinstance(value, str) else None
            self.is_wrong = text is None or self.has_arguments
            if not self.is_wrong:
                self.has_arguments = True
                self._ready.append(text)


class NamedArguments:
    """As `JsonCall`, where the name is known and the arguments stand alone."""

    is_between, value_class = False, JsonValue

    def __init__(self, name: str) -> None:
        self.name, self.has_arguments = name, True
        self._value = self.value_class()

    @property
    def is_whole(self) -> bool:
        return self._value.is_whole

    @property
    def is_wrong(self) -> bool:
        return self._value.is_wrong

    def take(self, text: str, at: int) -> int:
        return self._value.take(text, at)

    def arguments(self) -> str:
        return self._value.drain()

    def rest(self) -> str:
        return self._value.rest()


def object_text(text: str) -> str | None:
    """Return the text if it is the JSON of an object, "{}" for blanks; None: it is something else."""
    if not text.strip():
        return "{}"
    value = JsonValue()
    end = value.take(text, 0)
    return value.drain().strip() if value.is_whole and text.lstrip()[0] == "{" and not text[end:].strip() else None
