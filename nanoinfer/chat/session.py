"""A conversation with a model: its answers as they come, and what of them is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nanoinfer.chat.conversation import Conversation
from nanoinfer.chat.settings import Settings
from nanoinfer.common.units import counted
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import Event, Reasoning

Kind = Literal["thinking", "answer"]
Piece = tuple[Kind, str]
"""A part of an answer and what it is."""


@dataclass(frozen=True)
class Report:
    """What an answer took.

    Attributes:
        tokens_per_second: of the tokens behind the first one; None with fewer than two.
        bound: what the decode steps were bound by; None where too few ran to tell.
        cut: why it ended before the model ended it; None: it did not.
        block_size: of the prefix cache, which holds whole blocks of so many tokens.
    """

    num_tokens: int
    tokens_per_second: float | None
    bound: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_seconds: float | None
    cut: str | None
    block_size: int = 256

    def line(self) -> str:
        """Return the report in one line."""
        parts = [counted(self.num_tokens, "token")]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.bound is not None:
            parts.append(f"bound by {self.bound}")
        if self.first_token_seconds is not None:
            parts.append(f"the first after {self.first_token_seconds:.2f} s")
        cached = f", {self.num_cached_tokens:,} of them from the cache"
        if self.num_prompt_tokens <= self.block_size and not self.num_cached_tokens:
            cached = f" (the cache holds blocks of {self.block_size})"
        parts.append(f"prompt {self.num_prompt_tokens:,}{cached}")
        return "; ".join(parts if self.cut is None else [*parts, self.cut])


class Run(Protocol):
    """One answer of a model, as raw text.

    Attributes:
        prompt: the text behind which the answer stands.
        report: set when the text has ended.
    """

    prompt: str
    report: Report | None

    def __iter__(self) -> Iterator[str]: ...

    def stop(self) -> None:
        """End the answer soon. May be called at any moment, by a signal handler too."""

    def prompt_tokens(self) -> tuple[int, int]:
        """Return how many tokens of the prompt are read, and of how many. May be called by any thread."""


class Model(Protocol):
    """What a session needs of a model."""

    name: str
    format: AnswerFormat

    def run(self, messages: list[dict[str, Any]], settings: Settings) -> Run:
        """Begin an answer; ValueError if the template or the engine refuses the messages."""

    def computing_ahead(self, messages: list[dict[str, Any]], settings: Settings) -> AbstractContextManager[None]:
        """Compute what the next prompt begins with, behind the answer that is last, until this is left."""

    def stats(self) -> Mapping[str, Any]:
        """Return figures for `/stats`, by what they are called."""


class Answer:
    """An answer: iterate over its pieces.

    Attributes:
        text, thought: what has come so far.
    """

    def __init__(self, run: Run, form: AnswerFormat) -> None:
        self.text = self.thought = ""
        self.has_ended = False
        self.stop, self.prompt_tokens = run.stop, run.prompt_tokens
        self._run, self._parser = run, form.parser(run.prompt)

    @property
    def report(self) -> Report | None:
        return self._run.report

    def __iter__(self) -> Iterator[Piece]:
        for delta in self._run:
            yield from self._taken(self._parser.push(delta))
        yield from self._taken(self._parser.finish())
        self.has_ended = True

    def _taken(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:  # without tools there are no calls
            if isinstance(event, Reasoning):
                self.thought += event.text
                yield "thinking", event.text
            else:
                self.text += event.text
                yield "answer", event.text


class Session:
    """A conversation, its model and its settings.

    Attributes:
        total_tokens: generated in this session.
    """

    def __init__(self, model: Model, settings: Settings, system: str | None = None) -> None:
        self.model, self.settings = model, settings
        self.conversation = Conversation(system)
        self.last: Report | None = None
        self.total_tokens = 0

    def ask(self, question: str) -> Answer:
        """Begin an answer; it is part of the conversation only after `keep`.

        Raises:
            ValueError: the template or the engine refuses the messages.
        """
        messages = [*self._messages(), {"role": "user", "content": question}]
        return Answer(self.model.run(messages, self.settings), self.model.format)

    def waiting(self) -> AbstractContextManager[None]:
        """Prepare the next answer, until this is left."""
        messages = self._messages()
        has_answer = bool(messages) and messages[-1]["role"] == "assistant"
        return self.model.computing_ahead(messages, self.settings) if has_answer else nullcontext()

    def _messages(self) -> list[dict[str, Any]]:
        said, system = self.conversation.messages, self.conversation.system
        return [*said] if system is None else [{"role": "system", "content": system}, *said]

    def keep(self, question: str, answer: Answer) -> bool:
        """Add what was answered to the conversation, also where it was ended early; False if there is no answer."""
        if answer.report is not None:
            self.last = answer.report
            self.total_tokens += answer.report.num_tokens
        if not answer.text.strip():
            return False
        # As it was generated, so that the prefix cache has it; behind thinking it begins with empty lines, which
        # templates leave out.
        thought = answer.thought.strip()
        text = answer.text.lstrip("\n") if answer.thought else answer.text
        self.conversation.add(question, text, thought or None)
        return True
