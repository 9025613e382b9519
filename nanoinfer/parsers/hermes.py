"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import JsonCall

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(JsonCallReader):
    """Each call stands between tags; the models' templates show the tools so."""

    meant = (BEGIN, END)
    ends = (END,)

    def _outside(self) -> bool:
        text, mark = self._cut_before((BEGIN,))
        self._say(text)
        return mark is not None and self._open(self._cut(len(BEGIN)), JsonCall())

    def _behind(self) -> bool:
        """The end tag, or whatever comes where it is missing."""
        rest = self._held.lstrip()
        if END.startswith(rest) and rest != END:
            return False
        self._held = rest.removeprefix(END)
        self._step = self._outside
        return True

    def _finish(self) -> None:
        if self._step == self._behind and END.startswith(rest := self._held.lstrip()) and rest:
            self._held = ""  # a part of the end tag
        super()._finish()
