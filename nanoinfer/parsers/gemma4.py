"""Calls as Gemma 4 writes them: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`."""

from __future__ import annotations

import json
import re

from nanoinfer.parsers.base import num_held
from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import MAX_DEPTH, JsonValue, NamedArguments

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MAX_HEADER = 300  # characters
_MAX_BARE = 400  # of a key, a number or a word
# What a quantifier has taken it keeps (`++`): nothing is tried twice.
_HEADER = re.compile(r"\s*+call:\s*+([\w.\-]++)\s*+(?=\{)")
_HEADER_BEGUN = re.compile(r"\s*+(?:c(?:a(?:l(?:l(?::\s*+[\w.\-]*+\s*+)?+)?+)?+)?+)?+")
_BLANK = re.compile(r"\s*")
# A key or a value without quotes ends before one of these.
_BARE = re.compile(r"[^:,{}\[\]<\n]*")
_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORDS = {"none": "null", "true": "true", "false": "false", "null": "null"}


class Gemma4Value(JsonValue):
    """An object in Gemma 4's form, given on as JSON: keys without quotes, texts between `<|"|>`.

    A word that is no value of JSON is a text.

    Attributes:
        is_whole: it has ended. is_wrong: it has another form; what makes it wrong is not taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wants = "object"

    def rest(self) -> str:
        """Return what was read and is not known to be right yet, of a text or a value."""
        return json.dumps(self._part, ensure_ascii=False)[1:-1] if self._in_string else self._part

    def _string(self, text: str, at: int) -> int:
        """Within a text. What may be the begin of its end is held."""
        piece, self._part = self._part + text[at:], ""
        end = piece.find(QUOTE)
        length = len(piece) - num_held(piece, (QUOTE,)) if end < 0 else end
        self._undrained.append(json.dumps(piece[:length], ensure_ascii=False)[1:-1])
        if end < 0:
            self._part = piece[length:]
            return len(text)
        self._undrained.append('"')
        self._in_string = False
        self._ended()
        return len(text) - len(piece) + end + len(QUOTE)

    def _other(self, text: str, at: int) -> int:
        if not self._part:
            end = _BLANK.match(text, at).end()
            if end > at:
                return end
        is_mark = self._part.startswith("<") or not self._part and text[at] == "<"
        if is_mark:
            return self._mark(text, at)
        if self._wants.startswith(("key", "value")):
            end = _BARE.match(text, at).end()
            self._part += text[at:end]
            if len(self._part) > _MAX_BARE:
                self.is_wrong = True
                return at
            if end == len(text):
                return end
            if self._part or self._wants.startswith("key") and text[end] == ":":
                self._word()
                return end
        self._sign(text[at])
        return at if self.is_wrong else at + 1

    def _mark(self, text: str, at: int) -> int:
        """What begins a text, or is wrong."""
        length = len(QUOTE) - len(self._part)
        self._part += text[at : at + length]
        if not QUOTE.startswith(self._part) or not self._wants.startswith(("key", "value")):
            self.is_wrong = True
            return at
        if self._part == QUOTE:
            self._part, self._in_string = "", True
            self._undrained.append('"')
        return min(len(text), at + length)

    def _word(self) -> None:
        """A key or a value without quotes."""
        word, self._part = self._part.strip(), ""
        known = word if _ATOM.fullmatch(word) else _WORDS.get(word.lower())
        is_text = known is None or self._wants.startswith("key")
        self._undrained.append(json.dumps(word, ensure_ascii=False) if is_text else known)
        self._ended()

    def _sign(self, char: str) -> None:
        wants = self._wants
        if char == "{" and wants == "object" or char in "{[" and wants.startswith("value"):
            self.is_wrong = len(self._closers) >= MAX_DEPTH
            self._closers.append("}" if char == "{" else "]")
            self._wants = "key or end" if char == "{" else "value or end"
            self._undrained.append(char)
        elif self._closers and char == self._closers[-1] and wants.endswith("end"):
            self._closers.pop()
            self._undrained.append(char)
            self._wants = "value"
            self._ended()
        elif char == "," and wants == "comma or end":
            self._wants = "key" if self._closers[-1] == "}" else "value"
            self._undrained.append(", ")
        elif char == ":" and wants == "colon":
            self._wants = "value"
            self._undrained.append(": ")
        else:
            self.is_wrong = True


class Gemma4Arguments(NamedArguments):
    """As `NamedArguments`, of arguments in this form."""

    value_class = Gemma4Value


class Gemma4Reader(JsonCallReader):
    """Each call stands between tags, which are tokens, as what begins and ends a text is."""

    meant = (BEGIN, END, QUOTE)
    opens, ends = (BEGIN,), (END,)

    def _outside(self) -> bool:
        text, mark = self._cut_before((BEGIN,))
        self._say(text)
        if mark is not None:
            self._tag = self._cut(len(BEGIN))
            self._step = self._header
        return mark is not None

    def _header(self) -> bool:
        """Behind the tag: `call:` and a name."""
        if (header := _HEADER.match(self._held)) and header.end() <= _MAX_HEADER:
            return self._open(self._tag + self._cut(header.end()), Gemma4Arguments(header[1]))
        if len(self._held) <= _MAX_HEADER and _HEADER_BEGUN.fullmatch(self._held):
            return False
        self._say_as_it_is(self._tag)
        self._step = self._outside
        return True

    def _behind(self) -> bool:
        """The end tag, or whatever comes where it is missing."""
        if not self._cut_end(END):
            return False
        self._step = self._outside
        return True

    def _finish(self) -> None:
        if self._step == self._header:
            self._say_as_it_is(self._tag + self._held)
            self._held = ""
        elif self._step == self._behind and END.startswith(self._held):
            self._held = ""  # a part of the end tag
        super()._finish()
