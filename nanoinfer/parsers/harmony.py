"""Answers of gpt-oss, in OpenAI's harmony format: messages to several recipients in several channels.

A message is `<|start|>role to=recipient<|channel|>name <|constrain|>type<|message|>...<|end|>`, of which most parts may
be missing; `<|call|>` ends one to a tool, `<|return|>` the last one. The channel "analysis" is what is thought, "final"
the answer, and "commentary" without a recipient what the user reads before a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from nanoinfer.parsers.base import ToolReader, first
from nanoinfer.parsers.events import Event, Reasoning, Text
from nanoinfer.parsers.json_text import JsonValue
from nanoinfer.parsers.tools import Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_MAX_HEADER = 300  # characters
_CLOSERS = (END, CALL, RETURN)
_ROLE = r"[a-z]{0,20}"
_TYPE = r"(?:\s++(?!to=)\w++)?+"  # of what follows, as some write it without the token before it
# No part can be read in two ways, so nothing is tried twice: what a quantifier has taken it keeps (`++`).
_PARTS = rf"(?:\s*+to=[^\s<]++{_TYPE}|\s*+<\|channel\|>\s*+\w++{_TYPE}|\s*+<\|constrain\|>\s*+\w++)*+"
_BEGINNINGS = (CHANNEL, CONSTRAIN, MESSAGE, "to=")
Kind = Literal["answer", "reasoning", "call"]


class HarmonyReader(ToolReader):
    """Reads the messages of one answer.

    Args:
        prompt: the end of the prompt, in which the first message may have begun.
    """

    meant = (START, CHANNEL, CONSTRAIN, MESSAGE, *_CLOSERS)

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        new_id: Callable[[], str] | None = None,
        *,
        prompt: str = "",
    ) -> None:
        super().__init__(tools, new_id)
        self._kind: Kind = "answer"
        self._last: Kind | None = None
        self._name, self._seen = "", []  # `_seen`: blanks of a message to a tool, before its arguments begin
        self._value: JsonValue | None = None
        begun = prompt[prompt.rfind(START) + len(START) :] if START in prompt else ""
        self._held = "" if any(closer in begun for closer in _CLOSERS) else begun
        self._num_prompted = len(self._held)  # characters of it that the model did not write
        self._step = self._header

    def _outside(self) -> bool:
        """Between two messages."""
        rest = self._held.lstrip()
        self._held = rest
        if any(mark.startswith(rest) and mark != rest for mark in (START, CHANNEL)):
            return False
        self._held = rest.removeprefix(START)
        self._step = self._header
        return True

    def _header(self) -> bool:
        written = self._held[self._num_prompted :]
        parts = _PARTS if self._num_prompted else _ROLE + _PARTS
        hit = first(written, (MESSAGE, START, *_CLOSERS))
        if hit is not None and hit[1] == MESSAGE and hit[0] <= _MAX_HEADER:
            if re.fullmatch(rf"{parts}\s*", written[: hit[0]]):
                self._open(self._cut(self._num_prompted + hit[0]))
                self._held, self._num_prompted = self._held[len(MESSAGE) :], 0
                return True
        if hit is None and len(written) < _MAX_HEADER + len(MESSAGE):
            rest = written[re.match(parts, written).end() :].strip()
            if not rest or any(mark.startswith(rest) for mark in _BEGINNINGS):
                return False
        # The model does not keep to the format: what it says is its answer.
        self._num_prompted, self._kind, self._step = 0, "answer", self._body
        self._events.append(Text(written[:1]))
        self._held = written[1:]
        return True

    def _open(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "answer"
        if recipient is not None and self._tools:  # without tools it is a part of the answer
            self._kind, self._name = "call", recipient[1].removeprefix("functions.")
            self._value, self._seen = None, []
        elif self._last == self._kind:
            self._pass("\n")
        if self._kind != "call":
            self._last = self._kind
        self._step = self._body

    def _body(self) -> bool:
        text, mark = self._cut_before((START, CHANNEL, *_CLOSERS))
        self._pass(text)
        if mark is None:
            return False
        self._close()
        if mark in _CLOSERS:
            self._cut(len(mark))
        self._step = self._outside
        return True

    def _pass(self, text: str) -> None:
        """Give more of a message on."""
        if self._kind == "call" and text:
            if self._value is None:
                self._seen.append(text)
                if not (text := text.lstrip()):
                    return
                if text[0] != "{":
                    self._kind = "answer"
                    self._events.append(Text("".join(self._seen)))
                    return
                self._begin(self._name)
                self._value = JsonValue()
            self._value.take(text, 0)
            self._value.drain()
            self._argue(text)
        elif text:
            self._events.append(Reasoning(text) if self._kind == "reasoning" else Text(text))

    def _close(self) -> None:
        """A message has ended."""
        if self._kind == "call":
            if self._value is None:  # without arguments
                self._begin(self._name)
                self._argue("{}")
            self._end()
        self._kind = "answer"

    def _finish(self) -> None:
        if self._step == self._header:
            rest = self._held[self._num_prompted :]
            if rest.strip():
                self._events.append(Text(rest))
        elif self._step == self._body:
            self._pass(self._held)
            # The token that ends a call ends the answer, too, and is not in its text.
            if self._kind == "call" and self._value is not None and self._value.is_whole:
                self._close()
        elif rest := self._held.strip():
            self._pass(rest)
        self._held = ""

    def flush(self) -> Iterator[Event]:
        self._finish()
        yield from self._taken()
