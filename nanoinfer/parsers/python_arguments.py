"""Arguments of a call as Python has them, `a='x', b=[1, True])`, given on as JSON while they come."""

from __future__ import annotations

import json
import re

from nanoinfer.parsers.json_text import MAX_DEPTH

_MAX_WORD = 400  # characters of a key, a number or a word
_MAX_AHEAD = 600  # of what is looked at behind a quote
_NAME = r"[^\W\d][\w\-]*+"
_BLANK = re.compile(r"\s*")
_KEYWORD = re.compile(rf"({_NAME})\s*+=")
KEYWORD_BEGUN = re.compile(rf"\s*+(?:{_NAME}\s*+)?+")
_WORD = re.compile(r"[\w.+\-]*")
_MAY_GO_ON = re.compile(rf"\s*+(?:,\s*+(?:{_NAME}\s*+\Z|\Z)|,?+\s*+\)\s*+(?:[,;]?+\s*+[\w.\-]*+\s*+\Z)?+)?+")
_RUN = re.compile(r"""[^\\'"<]*""")
_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"None": "null", "null": "null", "True": "true", "true": "true", "False": "false", "false": "false"}
_ESCAPE = re.compile(
    r"\\(?:([\\'\"/abfnrtv0\n])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4}))"
)
_ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPED = dict(zip("abfnrtv0\n", ("\a", "\b", "\f", "\n", "\r", "\t", "\v", "\0", ""), strict=True))
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_IN_JSON = {"[": "[", "(": "[", "{": "{"}


class PythonArguments:
    """Keyword arguments behind the first parenthesis of a call, to the last one; as `json_text.NamedArguments`.

    It takes as much as it knows the meaning of: what is left is to be given again, with more text.

    A text ends where its quote does. In an argument itself the quote counts where the form goes on behind it, for
    templates write texts as they are: `text='it's', count=1`. A word that is no value of Python or JSON is a text.

    Args:
        end: the text that ends all calls, which no argument has.

    Attributes:
        has_arguments: the first argument has begun, or there is none: it is a call.
        may_close: nothing but the last parenthesis is missing.
    """

    is_between = False

    def __init__(self, name: str, end: str) -> None:
        self.name, self._end_mark = name, end
        self.is_whole = self.is_wrong = self.has_arguments = False
        self._closers = [")"]
        self._wants = "argument or end"
        self._quote = ""  # of the text that is read
        self._separator = ""
        self._undrained = ["{"]
        behind = rf"(?:\]|{re.escape(end)}|[,;]?+\s*+[\w.\-]++\s*+\()"
        self._goes_on = re.compile(rf"\s*+(?:,\s*+{_NAME}\s*+=|,?+\s*+\)\s*+{behind}|{re.escape(end)})")

    @property
    def may_close(self) -> bool:
        return len(self._closers) == 1 and self._wants == "comma or end" and not self._quote

    def take(self, text: str, at: int) -> int:
        """Read from a position in a text; return the position behind what is known."""
        while at < len(text) and not (self.is_whole or self.is_wrong):
            end = self._in_text(text, at) if self._quote else self._other(text, at)
            if end == at:
                break
            at = end
        return at

    def arguments(self) -> str:
        """Return what was read since the last call, as JSON."""
        text, self._undrained = "".join(self._undrained), []
        return text

    def rest(self) -> str:
        return ""

    def close(self) -> None:
        """The arguments end here."""
        self._undrained.append("}")
        self.is_wrong, self.is_whole = False, True

    def _give(self, text: str) -> None:
        self._undrained.append(self._separator + text)
        self._separator = ""

    def _other(self, text: str, at: int) -> int:
        """Outside of texts. The position stays where more text is needed, or something is wrong."""
        if (end := _BLANK.match(text, at).end()) > at:
            return end
        char, wants = text[at], self._wants
        if char == self._closers[-1] and wants.endswith("end"):
            return self._close(at)
        if wants.startswith("argument"):
            return self._keyword(text, at)
        if wants.startswith(("value", "key")):
            return self._value(text, at)
        if char == "," and wants == "comma or end":
            self._separator = ", "
            self._wants = {"}": "key or end", "]": "value or end"}.get(self._closers[-1], "value or end")
            if len(self._closers) == 1:
                self._wants = "argument or end"
            return at + 1
        if char == ":" and wants == "colon":
            self._undrained.append(": ")
            self._wants = "value"
            return at + 1
        self.is_wrong = True
        return at

    def _close(self, at: int) -> int:
        self._separator = ""
        closer = self._closers.pop()
        if not self._closers:
            self.has_arguments = True
            self.close()
        else:
            self._undrained.append("}" if closer == "}" else "]")
            self._wants = "comma or end"
        return at + 1

    def _keyword(self, text: str, at: int) -> int:
        found = _KEYWORD.match(text, at)
        if found is not None and found.end() - at <= _MAX_WORD:
            self._give(json.dumps(found[1], ensure_ascii=False) + ": ")
            self.has_arguments = True
            self._wants = "value"
            return found.end()
        self.is_wrong = len(text) - at > _MAX_WORD or KEYWORD_BEGUN.fullmatch(text, at) is None
        return at

    def _value(self, text: str, at: int) -> int:
        """The begin of a value, or of a key of an object."""
        char, is_key = text[at], self._wants.startswith("key")
        if char in "'\"":
            ahead = text[at : at + 3]
            if len(ahead) < 3 and ahead == char * len(ahead):
                return at
            self._quote = ahead if ahead == char * 3 else char
            self._give('"')
            return at + len(self._quote)
        if char in _CLOSERS and not is_key:
            self.is_wrong = len(self._closers) > MAX_DEPTH
            self._closers.append(_CLOSERS[char])
            self._give(_IN_JSON[char])
            self._wants = "key or end" if char == "{" else "value or end"
            return at + 1
        end = _WORD.match(text, at).end()
        if end == len(text) and end - at <= _MAX_WORD:
            return at
        if end == at or end - at > _MAX_WORD or text[end] == "(":
            self.is_wrong = True
            return at
        word = text[at:end]
        self._give(json.dumps(word, ensure_ascii=False) if is_key else _json_of(word))
        self._ended()
        return end

    def _in_text(self, text: str, at: int) -> int:
        end = _RUN.match(text, at).end()
        if end > at:
            self._undrained.append(json.dumps(text[at:end], ensure_ascii=False)[1:-1])
            return end
        char = text[at]
        if char == "\\":
            return self._escape(text, at)
        if char == "<" and self._end_mark.startswith(text[at : at + len(self._end_mark)]):
            self.is_wrong = text.startswith(self._end_mark, at)
            return at
        is_end = self._is_end(text, at) if char == self._quote[0] else False
        if is_end is None:
            return at
        if not is_end:
            self._undrained.append(json.dumps(char)[1:-1])
            return at + 1
        at += len(self._quote)
        self._quote = ""
        self._undrained.append('"')
        self._ended()
        return at

    def _is_end(self, text: str, at: int) -> bool | None:
        """Whether a text ends at a quote; None: more text will say."""
        if not text.startswith(self._quote, at):
            return None if self._quote.startswith(text[at:]) else False
        if len(self._closers) > 1 or len(self._quote) > 1:
            return True
        behind = at + 1
        found = self._goes_on.match(text, behind)
        if found is not None and found.end() - behind <= _MAX_AHEAD:
            return True
        rest = text[behind : behind + _MAX_AHEAD + 1]
        left = rest[_MAY_GO_ON.match(rest).end() :]
        return None if len(rest) <= _MAX_AHEAD and self._end_mark.startswith(left) else False

    def _escape(self, text: str, at: int) -> int:
        found = _ESCAPE.match(text, at)
        if found is None:
            if _ESCAPE_BEGUN.fullmatch(text, at):
                return at
            self._undrained.append("\\\\")  # as Python has what is no escape
            return at + 1
        sign, *numbers = found.groups()
        if sign is not None:
            made = json.dumps(_ESCAPED.get(sign, sign))[1:-1]
        else:
            number = int(next(filter(None, numbers)), 16)
            made = f"\\u{number:04x}" if number < 0x10000 else chr(number)
        self._undrained.append(made)
        return found.end()

    def _ended(self) -> None:
        """A key or a value has ended."""
        self._wants = "colon" if self._wants.startswith("key") else "comma or end"


def _json_of(word: str) -> str:
    """Return a value without quotes as JSON."""
    if (known := _WORDS.get(word)) is not None:
        return known
    number = word.removeprefix("+").replace("_", "")
    if number.startswith("."):
        number = "0" + number
    elif number.endswith("."):
        number += "0"
    return number if _ATOM.fullmatch(number) else json.dumps(word, ensure_ascii=False)
