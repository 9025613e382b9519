"""Calls as Mistral's models write them, behind `[TOOL_CALLS]`.

Newer models write `name[ARGS]{...}`, with `[CALL_ID]id` between for some, and the tag before each call; older ones a
list of `{"name": ..., "arguments": {...}}`.
"""

from __future__ import annotations

import re
import secrets
import string

from nanoinfer.parsers.base import MAX_BLANKS
from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import JsonCall, NamedArguments

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MAX_HEADER = 300  # characters
_ID_CHARS = string.ascii_letters + string.digits
ID_LENGTH = 9
# What a quantifier has taken it keeps (`++`): nothing is tried twice.
_HEADER = re.compile(r"\s*+([\w.\-]++)\s*+(?:\[CALL_ID\]\s*+([\w\-]++)\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_HEADER_BEGUN = re.compile(r"\s*+[\w.\-]*+\s*+(?:\[CALL_ID\]\s*+[\w\-]*+\s*+)?+(?:\[ARGS\]\s*+)?+")


def mistral_id() -> str:
    """Return an id as the templates of these models want them: nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(ID_LENGTH))


class MistralReader(JsonCallReader):
    """Reads either form."""

    meant = (TAG, CALL_ID, ARGS)
    opens = ends = (TAG,)
    make_id = staticmethod(mistral_id)

    def _outside(self) -> bool:
        text, mark = self._cut_before((TAG,))
        self._say(text)
        if mark is not None:
            self._tag = self._cut(len(TAG))
            self._in_list = False
            self._step = self._header
        return mark is not None

    def _header(self) -> bool:
        """Behind the tag: a list, an object, or a name."""
        rest = self._held.lstrip()
        if rest[:1] == "{":
            return self._open(self._tag, JsonCall())
        if rest[:1] == "[" and not any(mark.startswith(rest[:2]) for mark in (CALL_ID, ARGS)):
            inner = rest[1:].lstrip()
            if not inner and len(self._held) <= _MAX_HEADER:
                return False
            if inner[:1] == "{":
                self._tag += self._cut(len(self._held) - len(inner))
                self._in_list = True
                return self._open(self._tag, JsonCall())
            return self._refuse()
        if (header := _HEADER.match(self._held)) and header.end() <= _MAX_HEADER:
            self._tag += self._cut(header.end())
            return self._open(self._tag, NamedArguments(header[1]), header[2])
        left = self._held[_HEADER_BEGUN.match(self._held).end() :]
        if len(self._held) > _MAX_HEADER or left and not any(mark.startswith(left) for mark in (CALL_ID, ARGS)):
            return self._refuse()
        return False

    def _refuse(self) -> bool:
        self._say_as_it_is(self._tag)
        self._step = self._outside
        return True

    def _behind(self) -> bool:
        rest = self._held.lstrip()
        if not self._in_list:
            self._step = self._outside
            return True
        self._held = rest
        if not rest:
            return False
        if rest[0] == ",":
            inner = rest[1:].lstrip()
            if not inner and len(rest) <= MAX_BLANKS:
                return False
            if inner[:1] == "{":
                before = self._cut(len(self._held) - len(inner))
                return self._open(before, JsonCall())
        self._held = rest.removeprefix("]")
        self._step = self._outside
        return True

    def _finish(self) -> None:
        if self._step == self._header:
            self._say_as_it_is(self._tag + self._held)
            self._held = ""
        super()._finish()
