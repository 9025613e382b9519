"""Calls as Llama 3 writes them: the answer is `{"name": ..., "parameters": {...}}`, or several with ";" between."""

from __future__ import annotations

from nanoinfer.parsers.base import MAX_BLANKS
from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import JsonCall
from nanoinfer.parsers.tools import find_tool

TAG = "<|python_tag|>"
_KEYS = frozenset(("name", "parameters", "arguments", "type", "function", "id"))


class Llama3Reader(JsonCallReader):
    """An object at the begin of an answer, or behind a tag, is a call if it has the name of a tool. Else it is text."""

    meant = (TAG,)

    def _outside(self) -> bool:
        """The begin of an answer."""
        rest = self._held.lstrip()
        if (not rest or TAG.startswith(rest) and rest != TAG) and len(self._held) <= MAX_BLANKS:
            return False
        if rest[:1] == "{":
            return self._object(self._cut(len(self._held) - len(rest)))
        self._step = self._text
        return True

    def _text(self) -> bool:
        """Text up to a tag."""
        text, mark = self._cut_before((TAG,))
        self._say(text)
        if mark is not None:
            self._cut(len(TAG))
            self._step = self._tagged
        return mark is not None

    def _tagged(self) -> bool:
        rest = self._held.lstrip()
        if rest and rest[0] == "{":
            self._held = rest
            return self._object("")
        is_text = bool(rest) or len(self._held) > MAX_BLANKS
        if is_text:
            self._step = self._text
        return is_text

    def _object(self, before: str) -> bool:
        return self._open(before, JsonCall(_KEYS))

    def _behind(self) -> bool:
        rest = self._held.lstrip()
        after = rest.removeprefix(";").lstrip()
        if after[:1] == "{":
            self._held = after
            return self._object("")
        self._held = rest
        if (not after or TAG.startswith(rest) and rest != TAG) and len(rest) <= MAX_BLANKS:
            return False
        self._step = self._text
        return True

    def _is_call(self, name: str) -> bool:
        return find_tool(self._tools, name) is not None

    def _refused(self) -> None:
        self._step = self._text
