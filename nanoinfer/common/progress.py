"""How far something is that takes long, on a terminal, where it goes away again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import TextIO

Share = tuple[int, int]
"""How much is done, and of how much."""


class PromptProgress:
    """Shows how far a prompt is read, once that takes longer than `after` seconds, from a thread of its own: the first
    step of a long prompt may take long by itself. A context manager; `end` may be called before its end, and again.

    Args:
        look: how many tokens are read, and of how many; called by the thread.
        show, hide: put a line on the terminal in place of the one before, and take it away.
    """

    def __init__(
        self,
        look: Callable[[], Share],
        show: Callable[[str], None],
        hide: Callable[[], None],
        *,
        after: float = 1.0,
        every: float = 0.25,
    ) -> None:
        self._look, self._show, self._hide, self._after, self._every = look, show, hide, after, every
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nanoinfer-progress", daemon=True)

    def __enter__(self) -> PromptProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away; none comes after it."""
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds, most, is_shown = self._after, 0, False
        while not self._has_ended.wait(seconds):
            done, total = self._look()
            most = max(most, done)  # a step may have ended in the midst of the look
            if total:
                self._show(f"reading the prompt: {most:,} of {total:,} tokens")
                is_shown = True
            seconds = self._every
        if is_shown:
            self._hide()


def on_terminal(file: TextIO) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Return what shows a line on this terminal in place of the one before, and what takes it away."""

    def show(line: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # what is longer would begin another line, and stay
        file.write(f"\r{line[:width]}\x1b[K")
        file.flush()

    def hide() -> None:
        file.write("\r\x1b[K")
        file.flush()

    return show, hide
