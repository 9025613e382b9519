"""Markdown on a terminal while it comes: finished blocks are printed once, the last one is drawn again and again."""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

# Between two drawings: a terminal takes some milliseconds for each, and the engine waits meanwhile.
_SECONDS = 0.05
_TIMES = 10  # as long as the drawing before took

# HTML stays text: rich leaves it out, and with it whatever a model writes in tags.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


class MarkdownStream:
    """Shows Markdown as it comes. The part that changes never takes more lines than the window has."""

    def __init__(self, console: Console) -> None:
        self._console, self._pending, self._num_printed, self._next = console, "", 0, 0.0
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def feed(self, text: str) -> None:
        self._pending += text
        if "\n" in text:
            finished, self._pending = split_blocks(self._pending)
            self._print(finished)
        if (begin := time.monotonic()) >= self._next:
            self.draw()
            end = time.monotonic()
            self._next = end + max(_SECONDS, _TIMES * (end - begin))

    def draw(self) -> None:
        """Show the block that may still change, with two lines less than the window has: what scrolls out stays."""
        self._live.update(_Lines(self._pending, max(1, self._console.height - 2)), refresh=True)

    def end(self) -> None:
        """Print what is left, and give the terminal back."""
        self._live.update("", refresh=True)
        self._live.stop()
        self._print(self._pending)
        self._pending = ""

    def _print(self, text: str) -> None:
        if text.strip():
            if self._num_printed:
                self._console.print()
            self._console.print(_Lines(text), end="")
            self._num_printed += 1


class _Lines:
    """The lines of a text in Markdown without the empty ones before it: all, or the last `limit` ones."""

    def __init__(self, text: str, limit: int = 0) -> None:
        self._limit = limit
        self._markdown = Markdown(text, hyperlinks=False)  # links with their address behind them
        self._markdown.parsed = _PARSER.parse(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        while lines and not "".join(segment.text for segment in lines[0]).strip():
            del lines[0]
        for line in lines[-self._limit :]:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown before the last of its blocks, which may still change: (finished, rest).

    A last line that is not complete belongs to the last block: a "2" may become the next item of a list.
    """
    lines = text.split("\n")
    tokens = _PARSER.parse("\n".join(lines[:-1]))
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None and token.nesting >= 0]
    cut = starts[-1] if len(starts) > 1 else 0
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])
