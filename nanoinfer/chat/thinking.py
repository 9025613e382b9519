"""Where a model thinks: how that part of an answer is found, and how it comes back to the chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["thinking", "answer"]
Piece = tuple[Kind, str]
"""A part of an answer and what it is."""


@dataclass(frozen=True)
class Markers:
    """The texts between which a model thinks.

    Attributes:
        dropped: texts that belong to the form and to neither part.
        is_anywhere: they mean this wherever they stand. Else thinking only begins where an answer does: further on
            somebody may write about a tag.
    """

    begin: str
    end: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    is_anywhere: bool = False


# The first of which a template or a vocabulary has the begin is taken.
_KNOWN = (
    Markers(  # gpt-oss
        "<|channel|>analysis<|message|>",
        ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        ("<|end|>", "<|start|>assistant"),
        is_anywhere=True,
    ),
    Markers("<|channel>thought\n", ("<channel|>",)),
    Markers("<seed:think>", ("</seed:think>",)),
    Markers("<mm:think>", ("</mm:think>",)),
    Markers("<|START_THINKING|>", ("<|END_THINKING|>",), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    Markers("[THINK]", ("[/THINK]",)),
    Markers("<thinking>", ("</thinking>",)),
)
_USUAL = Markers("<think>", ("</think>",))
# Where templates look for the thinking of a message that is over; the names in their order of preference.
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")


@dataclass(frozen=True)
class Thinking:
    """How a model's template and tokenizer treat thinking.

    Attributes:
        special: special tokens' texts, which are in the text of an answer because a marker is one of them; else empty.
        field: of a message, where the template reads what was thought; None: it reads none.
        is_read_in_content: without such a field, the template looks for the end of thinking in the content itself.
    """

    markers: Markers = _USUAL
    special: tuple[str, ...] = ()
    field: str | None = None
    is_read_in_content: bool = False

    @classmethod
    def of(cls, template: str, special: Collection[str] = (), vocabulary: Collection[str] = ()) -> Thinking:
        """Find out from the text of a chat template, the special tokens, and all tokens that were added."""
        written = template.replace("\\n", "\n")  # as a string in Jinja has it
        known = (m for m in _KNOWN if m.begin in written or m.begin in vocabulary and m.end[0] in vocabulary)
        markers = next(known, _USUAL)
        is_special = any(token in text for text in (markers.begin, *markers.end) for token in special if token)
        return cls(
            markers,
            tuple(special) if is_special else (),
            next((name for name in _FIELDS if _reads(template, name)), None),
            any(end in template for end in markers.end) and "split(" in template,
        )

    def message(self, content: str, thought: str | None) -> dict[str, str]:
        """Return an answer as the template wants it: it decides itself whether what was thought is in the prompt."""
        found = {"role": "assistant", "content": content}
        if thought is not None and self.field is not None:
            found[self.field] = thought
        elif thought is not None and self.is_read_in_content:
            found["content"] = f"{self.markers.begin}\n{thought}\n{self.markers.end[0]}\n\n{content}"
        return found

    def splitter(self, prompt: str) -> Splitter:
        """Return what splits the answer to a prompt, which may end with the begin of thinking."""
        return Splitter(self.markers, self.special, is_thinking=prompt.rstrip().endswith(self.markers.begin.rstrip()))


def _reads(template: str, name: str) -> bool:
    """Whether the template asks a message for this field."""
    message = r"(?:message|msg|m|loop_message)"
    ways = (
        rf"\b{message}\.{name}\b",
        rf"\b{message}(?:\[|\.get\()\s*['\"]{name}['\"]",
        rf"['\"]{name}['\"] in {message}\b",
    )
    return any(re.search(way, template) for way in ways)


class Splitter:
    """Splits the text of an answer, as it comes, into what is thought and what is answered."""

    def __init__(self, markers: Markers, special: Collection[str] = (), *, is_thinking: bool = False) -> None:
        self._markers = markers
        # Parts of markers are none of them.
        whole = (markers.begin, *markers.end, *markers.dropped)
        self._dropped = (*markers.dropped, *(text for text in special if text and not any(text in w for w in whole)))
        self._kind: Kind = "thinking" if is_thinking else "answer"
        self._held = ""
        self._has_text = False  # of the current part, blanks apart

    def feed(self, text: str) -> Iterator[Piece]:
        """Take more text and yield what is known of it; what may be the beginning of a marker is held back."""
        self._held += text
        while (found := self._first()) is not None:
            place, marker = found
            yield from self._give(place)
            self._held = self._held[len(marker) :]
            if marker not in self._dropped:
                self._kind = "thinking" if marker == self._markers.begin else "answer"
                self._has_text = False
        yield from self._give(len(self._held) - self._num_held())

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back, at the end."""
        yield from self._give(len(self._held))

    def _give(self, length: int) -> Iterator[Piece]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._has_text |= not text.isspace()
            yield self._kind, text

    def _wanted(self) -> tuple[str, ...]:
        """The markers that mean something now."""
        begin, end = (self._markers.begin,), self._markers.end
        if self._markers.is_anywhere:
            return (*begin, *end, *self._dropped)
        if self._kind == "thinking":
            return (*end, *self._dropped)
        return (*(() if self._has_text else begin), *self._dropped)

    def _first(self) -> tuple[int, str] | None:
        found = [(self._held.find(marker), marker) for marker in self._wanted() if marker in self._held]
        found = [
            (place, marker)
            for place, marker in found
            if self._markers.is_anywhere or marker != self._markers.begin or not self._held[:place].strip()
        ]
        return min(found, key=lambda one: (one[0], -len(one[1])), default=None)

    def _num_held(self) -> int:
        """The length of the longest end of the text that may become a marker."""
        held = self._held
        lengths = [n for marker in self._wanted() for n in range(1, min(len(marker), len(held) + 1))]
        return max((n for n in lengths if any(m.startswith(held[-n:]) for m in self._wanted())), default=0)


def prompt_messages(
    system: str | None, messages: Collection[Mapping[str, str]], thinking: Thinking
) -> list[dict[str, Any]]:
    """Return a conversation as a model's template wants it."""
    found = [] if system is None else [{"role": "system", "content": system}]
    for message in messages:
        if message["role"] == "assistant":
            found.append(thinking.message(message["content"], message.get("reasoning_content")))
        else:
            found.append({"role": message["role"], "content": message["content"]})
    return found
