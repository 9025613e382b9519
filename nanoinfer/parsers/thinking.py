"""Where a model thinks: how that part of an answer is found, and how it comes back to the chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from nanoinfer.common.tables import by_name
from nanoinfer.parsers.base import Reader, first, num_held, pieces_of
from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Event, Reasoning


@dataclass(frozen=True)
class Markers:
    """The texts between which a model thinks.

    Attributes:
        dropped: texts that belong to the form and to neither part.

    Thinking only begins where an answer does: further on somebody may write about a tag.
    """

    begin: str
    end: tuple[str, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """The texts at which an answer's thinking begins and ends.

    Attributes:
        ends: any of them ends it.
        written: what is written to end it.
        again: what is written to end it once more, where it may begin several times; None: it begins once.
    """

    begin: str
    ends: tuple[str, ...]
    written: str
    again: str | None = None


HARMONY = "<|channel|>analysis<|message|>"  # gpt-oss; `harmony.py` reads its answers
# The first of which a template or a vocabulary has the begin is taken.
_KNOWN = (
    Markers(HARMONY, ("<|channel|>final<|message|>",)),
    Markers("<|channel>thought\n", ("<channel|>",)),
    Markers("<seed:think>", ("</seed:think>",)),
    Markers("<mm:think>", ("</mm:think>",)),
    Markers("<|START_THINKING|>", ("<|END_THINKING|>",), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    Markers("[THINK]", ("[/THINK]",)),
    Markers("<thinking>", ("</thinking>",)),
)
USUAL = Markers("<think>", ("</think>",))
_BY_BEGIN = {markers.begin: markers for markers in _KNOWN}
# By the names of vLLM's reasoning parsers.
MARKERS = by_name({
    "deepseek_r1 deepseek_v3 qwen3 glm45 ernie45 granite hunyuan_a13b step3 olmo3 minimax_m2 nemotron_v3": USUAL,
    "openai_gptoss": _BY_BEGIN[HARMONY],
    "gemma4": _BY_BEGIN["<|channel>thought\n"],
    "seed_oss": _BY_BEGIN["<seed:think>"],
    "minimax_m3": _BY_BEGIN["<mm:think>"],
    "cohere_command3": _BY_BEGIN["<|START_THINKING|>"],
    "mistral": _BY_BEGIN["[THINK]"],
})  # fmt: skip
# Where templates look for the thinking of a message that is over; the names in their order of preference.
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")


@dataclass(frozen=True)
class Thinking:
    """How a model's template and tokenizer treat thinking.

    Attributes:
        field: of a message, where the template reads what was thought; None: it reads none.
        is_read_in_content: without such a field, the template looks for the end of thinking in the content itself.
        is_known: template, vocabulary or user name the markers; else they are the usual ones, as good as any.
    """

    markers: Markers = USUAL
    field: str | None = None
    is_read_in_content: bool = False
    is_known: bool = False

    @classmethod
    def of(cls, template: str, vocabulary: Collection[str] = (), markers: Markers | None = None) -> Thinking:
        """Find out from the text of a chat template and all tokens that were added to the vocabulary.

        markers: those that the user names; None: the template says.
        """
        written = template.replace("\\n", "\n")  # as a string in Jinja has it
        known = (m for m in _KNOWN if m.begin in written or m.begin in vocabulary and m.end[0] in vocabulary)
        named = markers or next(known, None)
        markers = named or USUAL
        return cls(
            markers,
            next((name for name in _FIELDS if _reads(template, name)), None),
            any(end in template for end in markers.end) and "split(" in template,
            is_known=named is not None or markers.begin in written or markers.begin in vocabulary,
        )

    @property
    def meant(self) -> tuple[str, ...]:
        """The texts that mean something; special tokens that are part of one must be in the text."""
        return (self.markers.begin, *self.markers.end, *self.markers.dropped)

    def message(self, content: str, thought: str | None) -> dict[str, str]:
        """Return an answer as the template wants it: it decides itself whether what was thought is in the prompt."""
        message = {"role": "assistant", "content": content}
        if thought is not None and self.field is not None:
            message[self.field] = thought
        elif thought is not None and self.is_read_in_content:
            message["content"] = f"{self.markers.begin}\n{thought}\n{self.markers.end[0]}\n\n{content}"
        return message

    def reader(self, prompt: str, behind: Reader) -> ThinkingReader:
        """Return what reads the answer to a prompt, which may end with the begin of thinking."""
        begin = self.markers.begin.rstrip()
        return ThinkingReader(self.markers, behind, is_thinking=prompt.rstrip().endswith(begin))


def _reads(template: str, name: str) -> bool:
    """Whether the template asks a message for this field."""
    message = r"(?:message|msg|m|loop_message)"
    ways = (
        rf"\b{message}\.{name}\b",
        rf"\b{message}(?:\[|\.get\()\s*['\"]{name}['\"]",
        rf"['\"]{name}['\"] in {message}\b",
    )
    return any(re.search(way, template) for way in ways)


class ThinkingReader(Reader):
    """Takes what is thought off an answer; the rest goes to the reader behind it.

    Line ends around what is thought belong to the form and are left out. Where an answer ends within it, calls that
    were thought are calls: some models forget the marker before them.
    """

    def __init__(self, markers: Markers, behind: Reader, *, is_thinking: bool = False) -> None:
        self._markers, self._behind = markers, behind
        self._is_thinking = is_thinking
        self._has_thought = is_thinking  # the line ends that come are those behind a marker
        self._has_text = False  # of the current part
        self._held = ""
        self._lines: list[str] = []  # blanks that may belong to the form
        self._thought: list[str] = []  # since thinking began

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        while (hit := self._first()) is not None:
            position, marker = hit
            yield from self._give(position)
            self._held = self._held[len(marker) :]
            if marker not in self._markers.dropped:
                self._is_thinking = marker == self._markers.begin
                self._has_thought, self._has_text, self._lines, self._thought = True, False, [], []
        yield from self._give(len(self._held) - num_held(self._held, self._wanted()))

    def flush(self) -> Iterator[Event]:
        yield from self._give(len(self._held))
        if self._is_thinking:
            yield from self._calls_in_thought()
            return
        for piece in self._lines:
            yield from self._behind.feed(piece)
        yield from self._behind.flush()

    def _calls_in_thought(self) -> Iterator[Event]:
        """Yield the calls that are whole in what was thought last."""
        text, begins = "".join(self._thought), getattr(self._behind, "opens", ())
        if any(begin in text for begin in begins):
            events = [event for piece in pieces_of(text) for event in self._behind.feed(piece)]
            events += self._behind.flush()
            ended = {event.index for event in events if isinstance(event, CallEnded)}
            calls = (event for event in events if isinstance(event, CallBegun | CallArguments | CallEnded))
            yield from (event for event in calls if event.index in ended)

    def _give(self, length: int) -> Iterator[Event]:
        piece, self._held = self._held[:length], self._held[length:]
        if not (piece.strip("\n") if self._is_thinking and self._has_text else self._has_text or piece.strip()):
            self._lines += [piece] if piece else []
            return
        whole, self._lines = "".join([*self._lines, piece]), []
        if not self._has_text and self._has_thought:
            whole = whole.lstrip("\n")
        text = whole.rstrip("\n") if self._is_thinking else whole
        self._lines += [whole[len(text) :]] if len(text) < len(whole) else []
        if text:
            self._has_text |= not text.isspace()
            self._thought += [text] if self._is_thinking else []
            yield from [Reasoning(text)] if self._is_thinking else self._behind.feed(text)

    def _wanted(self) -> tuple[str, ...]:
        """The markers that mean something now."""
        if self._is_thinking:
            return (*self._markers.end, *self._markers.dropped)
        return (*(() if self._has_text else (self._markers.begin,)), *self._markers.dropped)

    def _first(self) -> tuple[int, str] | None:
        hit = first(self._held, self._wanted())
        if hit is None or hit[1] != self._markers.begin or not self._held[: hit[0]].strip():
            return hit
        return first(self._held, self._markers.dropped)
