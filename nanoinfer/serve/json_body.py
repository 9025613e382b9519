"""JSON in pieces: one call of the `json` module holds Python's lock (the GIL), for seconds if a body is large.

The grammar and the errors are those of `json.loads`: its decoder in Python reads objects and lists value by value, as
it does where the module's C code is missing. Here it gets strings and lists of numbers, which may be long, from
methods that read them piece by piece, so that other threads get their turn. Only a name is read in one call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray, JSONDecodeError, JSONObject, scanstring
from json.scanner import py_make_scanner
from typing import Any

MAX_VALUES = 200_000  # not counting the numbers at the beginning of lists; each takes some microseconds
PIECE_CHARS = 65_536  # about a millisecond of work
_NUMBERS = re.compile(r"[ \t\n\r]*[-0-9][-+.0-9eE \t\n\r,]*,")
# Whole characters of the decoded text: neither an escape nor a surrogate pair is cut.
STRING_PIECE = re.compile(
    r'(?:[^"\\\x00-\x1f]{1,64}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}'
    r'|\\["\\/bfnrt]){0,1024}+'
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
    return _Decoder(is_wanted).decode(body.decode(json.detect_encoding(body)))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


WHOLE = json.JSONDecoder(parse_constant=_refuse)


class _Decoder(json.JSONDecoder):
    """Each method takes the index where a part of the text begins, and returns the part and the index behind it."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        super().__init__(parse_constant=_refuse, object_pairs_hook=_members)
        self._is_wanted, self._num_values = is_wanted, 0
        self.parse_object, self.parse_array, self.parse_string = self._object, self._array, self._string
        self._scan, self.scan_once = py_make_scanner(self), self._value

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values beside lists of numbers: send less at once")
        if self._num_values % 256 == 0:
            self._ask()
        return self._scan(text, at)

    def _object(self, place: tuple[str, int], strict: bool, _: Callable, *hooks: Any) -> tuple[dict[str, Any], int]:
        return JSONObject(place, strict, self._value, *hooks)

    def _array(self, place: tuple[str, int], *_: Any) -> tuple[list, int]:
        (text, at), numbers = place, []
        while found := _NUMBERS.match(text, at, at + PIECE_CHARS):
            self._ask()
            try:
                numbers += WHOLE.decode(f"[{found.group()[:-1]}]")
            except ValueError:
                break  # reading them one by one says which is wrong
            at = found.end()
        others, end = JSONArray((text, at), self._value)
        if numbers and not others:
            raise JSONDecodeError("Expecting value", text, end - 1)
        return numbers + others, end

    def _string(self, text: str, begin: int, _: bool) -> tuple[str, int]:
        parts, at = [], begin
        while text[at : at + 1] != '"':
            self._ask()
            piece = STRING_PIECE.match(text, at).group()
            if not piece:
                return scanstring(text, begin)  # no string goes on like this: raises
            parts.append(scanstring(piece + '"', 0)[0])
            parts[-1].encode()  # half a surrogate pair is not a character
            at += len(piece)
        return "".join(parts), at + 1

    def _ask(self) -> None:
        if not self._is_wanted():
            raise GivenUpError


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    "".join(members).encode()  # as in strings
    return members
