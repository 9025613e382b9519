"""Calls as LFM2 and LFM2.5 write them: `<|tool_call_start|>[name(key="text", other=[1, True])]<|tool_call_end|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import JsonCall
from nanoinfer.parsers.python_arguments import KEYWORD_BEGUN, PythonArguments

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
_MAX_HEADER = 300  # characters
# What a quantifier has taken it keeps (`++`): nothing is tried twice.
_HEADER = re.compile(r"\s*+\[?+\s*+(?:([\w.\-]++)\s*+\(|(?=\{))")
_HEADER_BEGUN = re.compile(r"\s*+\[?+\s*+[\w.\-]*+\s*+")
_NEXT = re.compile(r"[,;]?+\s*+(?:([\w.\-]++)\s*+\(|(?=\{))")
_NEXT_BEGUN = re.compile(r"[,;]?+\s*+[\w.\-]*+\s*+")


class Lfm2Reader(JsonCallReader):
    """A list of calls between tags, which are tokens. Asked for it, the models write calls as JSON objects there."""

    meant = (BEGIN, END)
    opens, ends = (BEGIN,), (END,)

    def _outside(self) -> bool:
        text, mark = self._cut_before((BEGIN,))
        self._say(text)
        if mark is not None:
            self._tag = self._cut(len(BEGIN))
            self._step = self._header
        return mark is not None

    def _header(self) -> bool:
        """Behind the tag: the begin of a list, a name and a parenthesis, or an object."""
        if (found := _HEADER.match(self._held)) and found.end() <= _MAX_HEADER:
            return self._open_call(found)
        if len(self._held) <= _MAX_HEADER and _HEADER_BEGUN.fullmatch(self._held):
            return False
        self._say_as_it_is(self._tag)
        self._step = self._outside
        return True

    def _open_call(self, found: re.Match[str]) -> bool:
        before, self._tag = self._tag + self._cut(found.end()), ""
        return self._open(before, JsonCall() if found[1] is None else PythonArguments(found[1], END))

    def _go_wrong(self) -> bool:
        call = self._call
        if isinstance(call, PythonArguments) and call.may_close and END.startswith(self._held[: len(END)]):
            if self._held.startswith(END):  # the last parenthesis is missing
                call.close()
                self._go_on()
                self._end()
                self._step = self._behind
            return self._held.startswith(END)
        return super()._go_wrong()

    def _behind(self) -> bool:
        """Another call, or what ends the list."""
        self._held = self._held.lstrip()
        if (found := _NEXT.match(self._held)) and found.end() <= _MAX_HEADER:
            return self._open_call(found)
        if len(self._held) <= _MAX_HEADER and _NEXT_BEGUN.fullmatch(self._held):
            return False
        self._held = self._held.removeprefix("]")
        self._step = self._closing
        return True

    def _closing(self) -> bool:
        """The end tag, or whatever comes where it is missing."""
        if not self._cut_end(END):
            return False
        self._step = self._outside
        return True

    def _finish(self) -> None:
        if self._step == self._header:
            self._say_as_it_is(self._tag + self._held)
            self._held = ""
        elif self._step == self._closing and END.startswith(self._held):
            self._held = ""  # a part of the end tag
        elif self._step == self._inside and isinstance(self._call, PythonArguments):
            self._finish_arguments()
        super()._finish()

    def _finish_arguments(self) -> None:
        """What was waited for does not come any more."""
        call = self._call
        call.take(self._held + END, 0)
        if not self._has_begun and KEYWORD_BEGUN.fullmatch(self._held):
            call.has_arguments = True
            self._begin(call.name, self._call_id)
            self._has_begun = True
            call.arguments()  # the call is cut off before them
        self._go_on()
        if self._has_begun:
            self._held = ""
        if call.is_whole:
            self._end()
            self._step = self._outside


def written_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls of a message as text, for templates that show the content alone: as the model's authors write them.

    calls: with arguments that are objects, or their text if they are none.
    """
    return f"{BEGIN}[{', '.join(map(_written, calls))}]{END}"


def _written(call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def _python(value: Any) -> str:
    if isinstance(value, str | Mapping):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
