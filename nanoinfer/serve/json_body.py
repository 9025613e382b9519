"""JSON in pieces: one call of the `json` module holds Python's lock (the GIL), for seconds if a body is large.

The grammar, the values and the errors are those of `json.loads`. Values that may be long (a string, a list of numbers)
are read piece by piece, so that other threads get their turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import JSONDecodeError
from json.decoder import scanstring
from typing import Any

MAX_VALUES = 200_000  # not counting numbers in lists; all others are read one by one, some microseconds each
_PIECE_CHARS = 65_536  # about a millisecond of work
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"[-0-9][-+.0-9eE \t\n\r,]*,")
# A match ends between two characters of the decoded text: neither an escape nor a surrogate pair is cut.
_STRING_PIECE = re.compile(
    r'(?:[^"\\]{1,64}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]){0,1024}+'
)


class GivenUpError(Exception):
    """The reading was given up because nobody waits for the value any more."""


def load(body: bytes, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """Return the value of a JSON text.

    Args:
        is_wanted: called between pieces; False ends the reading.

    Raises:
        ValueError: the text is not JSON, or has a constant such as NaN, half a surrogate pair, or more than
            `MAX_VALUES` values.
        RecursionError: the text is nested too deeply.
        GivenUpError: `is_wanted` returned False.
    """
    reader = _Reader(body.decode(json.detect_encoding(body)), is_wanted)
    value, end = reader.value(reader.space(0))
    end = reader.space(end)
    if end != len(reader.text):
        raise JSONDecodeError("Extra data", reader.text, end)
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


_whole = json.JSONDecoder(parse_constant=_refuse)


class _Reader:
    """Reads parts of a JSON text. Each method takes the index where a part begins.

    It returns the part, if it reads a value, and the index behind the part.
    """

    def __init__(self, text: str, is_wanted: Callable[[], bool]) -> None:
        if text.startswith("\ufeff"):
            raise JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
        self.text, self._is_wanted = text, is_wanted
        self._num_values = 0
        self._no_numbers_before = 0  # a number before this index is wrong: read them one by one, to say which

    def space(self, at: int) -> int:
        return _SPACE.match(self.text, at).end()

    def value(self, at: int) -> tuple[Any, int]:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values beside lists of numbers: send less at once")
        if self._num_values % 256 == 0:
            self._ask()
        match self.text[at : at + 1]:
            case '"':
                return self._string(at + 1)
            case "[":
                return self._array(at + 1)
            case "{":
                return self._object(at + 1)
        try:
            return _whole.scan_once(self.text, at)
        except StopIteration:
            raise JSONDecodeError("Expecting value", self.text, at) from None

    def _array(self, at: int) -> tuple[list, int]:
        values: list[Any] = []
        at = self.space(at)
        if self.text[at : at + 1] == "]":
            return values, at + 1
        while True:
            at = self._numbers(values, at)
            value, at = self.value(at)
            values.append(value)
            at, is_last = self._next(at, "]")
            if is_last:
                return values, at

    def _numbers(self, values: list[Any], at: int) -> int:
        """Append numbers, many at once, as long as a comma follows."""
        while at >= self._no_numbers_before and (found := _NUMBERS.match(self.text, at, at + _PIECE_CHARS)):
            self._ask()
            try:
                values += _whole.decode(f"[{found.group()[:-1]}]")
            except ValueError:
                self._no_numbers_before = found.end()
                return at
            at = self.space(found.end())
        return at

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = self.space(at)
        if self.text[at : at + 1] == "}":
            return members, at + 1
        while True:
            if self.text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self.text, at)
            name, at = self._string(at + 1)
            at = self.space(at)
            if self.text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self.text, at)
            members[name], at = self.value(self.space(at + 1))
            at, is_last = self._next(at, "}")
            if is_last:
                return members, at

    def _next(self, at: int, closing: str) -> tuple[int, bool]:
        """Return (index of the next member, False), or (index behind the `closing` bracket, True)."""
        at = self.space(at)
        mark = self.text[at : at + 1]
        if mark == closing:
            return at + 1, True
        if mark != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self.text, at)
        return self.space(at + 1), False

    def _string(self, at: int) -> tuple[str, int]:
        parts, begin = [], at
        while True:
            piece = _STRING_PIECE.match(self.text, at).group()
            try:
                part = scanstring(piece + '"', 0)[0]
            except JSONDecodeError as error:
                raise JSONDecodeError(error.msg, self.text, at + error.pos) from None
            if "\\u" in piece:
                part.encode()  # half a surrogate pair is not a character
            parts.append(part)
            at += len(piece)
            if self.text[at : at + 1] == '"':
                return "".join(parts), at + 1
            if not piece:
                is_cut = len(self.text) - at < 2  # nothing is left, or a lone backslash
                what = ("Unterminated string starting at", begin - 1) if is_cut else ("Invalid \\uXXXX escape", at + 1)
                raise JSONDecodeError(what[0], self.text, what[1])
            self._ask()

    def _ask(self) -> None:
        if not self._is_wanted():
            raise GivenUpError
