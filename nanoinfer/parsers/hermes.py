"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from nanoinfer.parsers.base import MAX_BLANKS
from nanoinfer.parsers.json_calls import JsonCallReader
from nanoinfer.parsers.json_text import JsonCall

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(JsonCallReader):
    """Each call stands between tags; the models' templates show the tools so."""

    meant = (BEGIN, END)
    opens, ends = (BEGIN,), (END,)

    def _outside(self) -> bool:
        text, mark = self._cut_before((BEGIN,))
        self._say(text)
        return mark is not None and self._open(self._cut(len(BEGIN)), JsonCall())

    def _behind(self) -> bool:
        """The end tag, behind a brace too many or not, or whatever comes where it is missing."""
        self._held = self._held.lstrip()
        after = self._after_brace()
        if END.startswith(after) and after != END and len(self._held) <= MAX_BLANKS:
            return False
        if after.startswith(END):
            self._held = after.removeprefix(END)
        self._step = self._outside
        return True

    def _after_brace(self) -> str:
        return self._held[1:].lstrip() if self._held.startswith("}") else self._held

    def _finish(self) -> None:
        if self._step == self._behind and END.startswith(self._after_brace()) and self._held:
            self._held = ""  # a part of the end tag
        super()._finish()
