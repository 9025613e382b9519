"""A chat on a terminal: prompt_toolkit reads, rich writes."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from nanoinfer.chat.commands import COMMANDS
from nanoinfer.chat.markdown import MarkdownStream
from nanoinfer.chat.screens import is_open, unquoted
from nanoinfer.chat.session import Kind
from nanoinfer.common.progress import PromptProgress, Share
from nanoinfer.common.terminal import without_orders

HISTORY = "chat_history"


class TerminalScreen:
    """Reads messages with history and several lines, and shows answers as Markdown.

    Args:
        directory: where the history lies; it is made.
        patience: seconds after which it is shown how far a prompt is read.
    """

    def __init__(self, directory: Path, *, patience: float = 1.0) -> None:
        self._console, self._patience = Console(highlight=False), patience
        self._session = PromptSession(
            history=self._history(directory),
            multiline=True,  # Enter sends all the same, by the bindings
            key_bindings=_bindings(),
            completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
            complete_while_typing=False,
            prompt_continuation=lambda width, *_: "... ".rjust(width),
        )

    def _history(self, directory: Path) -> History:
        path = directory / HISTORY
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # what is asked is nobody else's
            path.open("ab").close()
        except OSError as error:
            self.note(f"what you type is not kept for the next chat: {error}")
            return InMemoryHistory()
        return FileHistory(str(path))

    def read(self) -> str | None:
        while True:
            try:
                text = unquoted(self._session.prompt(">>> "))
            except KeyboardInterrupt:
                self.note("/exit or Ctrl-D ends the chat")
            except EOFError:
                return None
            else:
                if text:
                    return text

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def complain(self, text: str) -> bool:
        self._console.print(Text(text, style="red"))
        return True

    @contextmanager
    def answering(self, prompt_tokens: Callable[[], Share]) -> Iterator:
        answer, status = _AnswerOnTerminal(self._console), self._console.status("", spinner_style="dim")

        def show_progress(line: str) -> None:
            status.update(Text(line, style="dim"))
            status.start()

        def show(kind: Kind, text: str) -> None:
            progress.end()
            answer.show(kind, text)

        with _no_echo():
            try:
                with PromptProgress(prompt_tokens, show_progress, status.stop, after=self._patience) as progress:
                    yield show
            finally:
                answer.end()


class _AnswerOnTerminal:
    """Shows thinking dim and as it is, and what is answered as Markdown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._markdown: MarkdownStream | None = None
        self._has_thought = False

    def show(self, kind: Kind, text: str) -> None:
        text = without_orders(text)
        if kind == "answer":
            if self._markdown is None and text.strip():
                self._end_thinking()
                self._markdown = MarkdownStream(self._console)
            if self._markdown is not None:
                self._markdown.feed(text)
            return
        if self._markdown is not None:
            self._end_markdown()
        text = text if self._has_thought else text.lstrip()
        if text:
            self._has_thought = True
            self._console.print(Text(text, style="dim"), end="", soft_wrap=True)

    def end(self) -> None:
        self._end_thinking()
        self._end_markdown()

    def _end_thinking(self) -> None:
        if self._has_thought:
            self._console.print("\n")
            self._has_thought = False

    def _end_markdown(self) -> None:
        if self._markdown is not None:
            ended, self._markdown = self._markdown, None
            ended.end()


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep what is typed meanwhile, ^C too, out of the picture; the next prompt reads it, Enter as Enter."""
    before = termios.tcgetattr(sys.stdin)
    changed = [*before]
    changed[0] &= ~termios.ICRNL
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @Condition
    def is_quoting() -> bool:
        return is_open(get_app().current_buffer.text)

    @bindings.add("enter", filter=~is_quoting)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
