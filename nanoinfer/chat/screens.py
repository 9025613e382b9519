"""How a chat looks: on a terminal, and through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol, TextIO

from nanoinfer.chat.session import Kind
from nanoinfer.common.progress import PromptProgress, Share, on_terminal

QUOTES = '"""'


class Screen(Protocol):
    """Where messages come from and answers go to."""

    def read(self) -> str | None:
        """Return the next message or command, without blanks around it; None at the end of the chat."""

    def say(self, text: str) -> None:
        """Show what a command found."""

    def note(self, text: str) -> None:
        """Show something beside the conversation."""

    def complain(self, text: str) -> bool:
        """Show what went wrong; return whether the chat goes on."""

    def answering(self, prompt_tokens: Callable[[], Share]) -> object:
        """Return a context manager around one answer, which gives `show(kind, text)`; until its first call a terminal
        shows how many tokens of the prompt are read.
        """


def is_open(text: str) -> bool:
    """Whether the text begins with three quotation marks that no others close yet."""
    return text.lstrip().startswith(QUOTES) and QUOTES not in text.lstrip()[len(QUOTES) :]


def unquoted(text: str) -> str:
    """Return the text without three quotation marks around it."""
    text = text.strip()
    if text.startswith(QUOTES) and not is_open(text):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


class PlainScreen:
    """Messages from the lines of a file, answers to another one, as they are; everything else to `notes`.

    The first error ends the chat: what follows was written for a conversation without it.
    """

    def __init__(self, lines: TextIO, answers: TextIO, notes: TextIO = sys.stderr) -> None:
        self._lines, self._answers, self._notes = lines, answers, notes

    def read(self) -> str | None:
        while (text := self._lines.readline()) and not text.strip():
            pass
        while is_open(text) and (line := self._lines.readline()):
            text += line
        return unquoted(text) if text else None

    def say(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def complain(self, text: str) -> bool:
        self.note(f"nanoinfer chat: {text}")
        return False

    @contextmanager
    def answering(self, prompt_tokens: Callable[[], Share]) -> Iterator:
        is_thinking, was_thinking = False, False  # the latter until the first line of the answer

        def show(kind: Kind, text: str) -> None:
            nonlocal is_thinking, was_thinking
            if progress is not None:
                progress.end()
            if is_thinking != (kind == "thinking"):
                is_thinking, was_thinking = not is_thinking, is_thinking
                self._answers.write("<think>\n" if is_thinking else "\n</think>\n\n")
            if was_thinking:  # models put empty lines there, or none
                text = text.lstrip("\n")
                was_thinking = not text
            self._answers.write(text)
            self._answers.flush()

        is_seen = self._notes.isatty()  # also where only the answers go elsewhere
        waiting = PromptProgress(prompt_tokens, *on_terminal(self._notes)) if is_seen else nullcontext()
        try:
            with waiting as progress:
                yield show
        finally:
            self._answers.write("\n</think>\n" if is_thinking else "\n")
            self._answers.flush()
