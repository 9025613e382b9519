"""What a parser finds in an answer, piece by piece, and the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """More of what is answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what is thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; its arguments come behind.

    Attributes:
        index: 0 for the first call of an answer, 1 for the next one, and so on.
        id: made by the parser, or the model's own.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the pieces joined are the JSON text of an object, as far as the model wrote one."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is whole. One that the end of the answer cut off does not end."""

    index: int


Event = Text | Reasoning | CallBegun | CallArguments | CallEnded


@dataclass
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: the JSON text of an object; where `is_whole` is False, its beginning.
    """

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass
class Message:
    """An answer as a whole."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> Message:
        """Take the next events; return the message itself."""
        for event in events:
            match event:
                case Text(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    self.tool_calls[index].arguments += text
                case CallEnded(index):
                    self.tool_calls[index].is_whole = True
        return self
