"""A chat without an engine, a program of it, and a terminal to look at it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from nanoinfer.chat.conversation import state_directory
from nanoinfer.chat.loop import converse
from nanoinfer.chat.session import Report, Session
from nanoinfer.chat.settings import Settings
from nanoinfer.parsers.answer_format import AnswerFormat

ROOT = Path(__file__).resolve().parents[2]
# As Qwen3's: what was thought is read in a field, and left out before the newest question.
TEMPLATE = "{% if message.reasoning_content is string %}...{% endif %}content.split('</think>')"
ANSWERS = {
    "think": "<think>\nfirst this, then that\n</think>\n\nI have *thought*.",
    "orders": "<think>a\x1b[31mb</think>c\x1b[31md\x9b31me\r\x08f",
    "markdown": "# A title\n\n- **one**\n- two\n\nthe end <b>\n",
}


class ScriptedRun:
    """The text of `ANSWERS`, or the question again; "endless" goes on until it is stopped, "deaf" only hears it.

    "slow" comes word by word. "interrupted" is a Ctrl-C before the answer begins. The answer to "long" comes when its
    prompt was looked at twice.
    """

    prompt = "the prompt"

    def __init__(self, question: str) -> None:
        self.report, self._question, self._is_stopped = None, question, False
        self._num_looks, self._is_read = 0, threading.Event()

    def prompt_tokens(self) -> tuple[int, int]:
        if self._question != "long":
            return 0, 0
        self._num_looks += 1
        if self._num_looks == 2:
            self._is_read.set()
        return 1000 * self._num_looks, 5000

    def stop(self) -> None:
        self._is_stopped = True

    def __iter__(self) -> Iterator[str]:
        number = 0
        try:
            if self._question == "long":
                self._is_read.wait()
            if self._question in ("endless", "deaf", "slow"):
                while number < 300 if self._question == "slow" else self._question == "deaf" or not self._is_stopped:
                    yield f"heard{number} " if self._is_stopped else f"word{number} "
                    number += 1
                    time.sleep(0.001)
            elif self._question == "nothing":
                raise ValueError("the prompt has no room: raise max_model_len")
            else:
                for piece in re.findall(r".{1,3}", ANSWERS.get(self._question, f"You: {self._question}"), re.DOTALL):
                    yield piece
                    number += 1
        finally:
            cut = "ended by you" if self._question in ("endless", "deaf") else None
            self.report = Report(number, 50.0, "link", 7, 3, 0.5, cut)


class ScriptedModel:
    name, format = "scripted", AnswerFormat.of(TEMPLATE)

    def __init__(self) -> None:
        self.asked: list[list[dict]] = []

    def computing_ahead(self, messages: list[dict], settings: Settings) -> nullcontext:
        return nullcontext()

    def run(self, messages: list[dict], settings: Settings) -> ScriptedRun:
        self.asked.append(messages)
        if messages[-1]["content"] == "interrupted":
            raise KeyboardInterrupt
        return ScriptedRun(messages[-1]["content"])

    def stats(self) -> dict[str, str]:
        return {"advice": "more of everything"}


def main() -> None:
    """A chat with the scripted model on this process's terminal."""
    from nanoinfer.chat.terminal import TerminalScreen

    converse(Session(ScriptedModel(), Settings()), TerminalScreen(state_directory(), patience=0), stops_answers=True)
    print("ended well")


class Terminal:
    """A pseudo-terminal of so many columns.

    Attributes:
        raw: all that was written to it.
    """

    def __init__(self, columns: int = 80) -> None:
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._bytes, self._read_until = b"", 0

    @property
    def raw(self) -> str:
        return self._bytes.decode(errors="ignore")

    @property
    def lines(self) -> list[str]:
        """Without colours and movements."""
        return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])", "", self.raw).replace("\r", "\n").splitlines()

    @property
    def seen(self) -> str:
        """The words, however the window breaks the lines."""
        return " ".join(" ".join(self.lines).split())

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Reads until the text has come behind what was waited for before; returns what came until its end."""
        deadline = time.monotonic() + seconds
        while (place := self.seen.find(text, self._read_until)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen[self._read_until :][-999:]!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self._bytes += os.read(self._master, 65536)
        begin, self._read_until = self._read_until, place + len(text)
        return self.seen[begin : self._read_until]

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)


class Chat(Terminal):
    """The program `main` on a terminal of its own, which sends it SIGINT on Ctrl-C."""

    def __init__(self, state: Path, columns: int = 80) -> None:
        super().__init__(columns)
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        environment |= {"XDG_STATE_HOME": str(state), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self._process = subprocess.Popen(
            [sys.executable, "-c", "import chatting; chatting.main()"],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment, cwd=state,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        self.wait_for(">>>")

    def ask(self, text: str) -> None:
        self.send(text + "\r")

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.close()
