"""What parsers of answers share: text that may become a marker is held back, and calls are numbered."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Event, Text
from nanoinfer.parsers.tools import Tool


def new_id() -> str:
    """Return an id for a call, as OpenAI's API has them."""
    return f"call_{uuid.uuid4().hex[:24]}"


MAX_BLANKS = 300
"""Characters that may stand where blanks mean nothing: behind more of them nothing belongs to a form any more, so what
waits for the rest of one stays short."""
_PIECE = 256  # characters


def num_held(text: str, markers: Collection[str]) -> int:
    """Return the length of the longest end of a text that may become one of the markers."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    return next((size for size in range(longest, 0, -1) if any(m.startswith(text[-size:]) for m in markers)), 0)


def first(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """Return where the first marker stands in a text, and which one; of several at one place the longest."""
    hits = [(text.find(marker), marker) for marker in markers if marker in text]
    return min(hits, key=lambda one: (one[0], -len(one[1])), default=None)


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces: each step of a reader may look at all that it holds."""
    for begin in range(0, len(text), _PIECE):
        yield text[begin : begin + _PIECE]


class Reader(ABC):
    """Reads the text of one answer. What it gives does not depend on the pieces in which the text comes."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[Event]:
        """Take more text and yield what is known of it."""

    @abstractmethod
    def flush(self) -> Iterator[Event]:
        """Yield what was held back, at the end."""


class ToolReader(Reader):
    """Finds calls of tools in what is answered.

    A step looks at `_held`, takes what it knows off its beginning, and says whether it may be called again before more
    text comes. Blanks before a call and behind it belong to the form and are left out.

    Args:
        tools: that may be called.
        new_id: makes the id of a call; None: as the model's template wants them.

    Attributes:
        meant: the texts that mean something; special tokens that are part of one must be in the text.
        opens: of these, what may begin a call; none where one stands at the begin of an answer.
    """

    opens: ClassVar[tuple[str, ...]] = ()
    meant: ClassVar[tuple[str, ...]] = ()
    make_id: ClassVar[Callable[[], str]] = staticmethod(new_id)

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] | None = None) -> None:
        self._tools, self._new_id = tools, new_id or self.make_id
        self._held = ""
        self._events: list[Event] = []
        self._blanks: list[str] = []  # that are left out if a call follows
        self._is_behind_call = False
        self._num_calls = 0
        self._step: Callable[[], bool] = self._outside

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        while self._step():
            pass
        yield from self._taken()

    def flush(self) -> Iterator[Event]:
        self._finish()
        if self._blanks and not self._is_behind_call:
            self._events.append(Text("".join(self._blanks)))
        self._blanks = []
        yield from self._taken()

    @abstractmethod
    def _outside(self) -> bool:
        """The step where no call is read."""

    @abstractmethod
    def _finish(self) -> None:
        """No more text comes: make what is right of the rest."""

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _cut(self, length: int) -> str:
        """Take so many characters off the text that is held."""
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _cut_end(self, end: str) -> bool:
        """Drop blanks and the end tag, or nothing where it is missing; False: more of it may come."""
        self._held = self._held.lstrip()
        if end.startswith(self._held) and self._held != end and len(self._held) <= MAX_BLANKS:
            return False
        self._held = self._held.removeprefix(end)
        return True

    def _cut_before(self, markers: Collection[str]) -> tuple[str, str | None]:
        """Take the text before the first marker off, and return both; None: no more is known to be before one."""
        hit = first(self._held, markers)
        if hit is None:
            return self._cut(len(self._held) - num_held(self._held, markers)), None
        return self._cut(hit[0]), hit[1]

    def _say(self, text: str) -> None:
        """Give text that is part of no call."""
        if self._is_behind_call and not self._blanks:
            text = text.lstrip()
        said = text.rstrip()
        if said:
            self._is_behind_call = False
            self._events.append(Text("".join([*self._blanks, said])))
            self._blanks = []
        if self._is_behind_call:
            self._blanks = []
        elif len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _say_as_it_is(self, text: str) -> None:
        """Give the text of what is no call."""
        whole, self._blanks = "".join([*self._blanks, text]), []
        if whole:
            self._is_behind_call = False
            self._events.append(Text(whole))

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._blanks = []
        self._events.append(CallBegun(self._num_calls, call_id or self._new_id(), name))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._num_calls, text))

    def _end(self) -> None:
        self._events.append(CallEnded(self._num_calls))
        self._num_calls += 1
        self._is_behind_call = True
