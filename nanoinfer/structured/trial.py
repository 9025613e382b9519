"""Grammars are compiled for trial in a process of their own, which may end or be ended without harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("check.py")
_LIMIT_SECONDS = 3.0
_WAIT_SECONDS = 60.0
_CLOSED = "the engine was closed meanwhile"
_SIMPLER = "give a simpler one, with fewer references, patterns and optional properties"


class Trial:
    """Compiles for trial, one grammar after the other. Threads may share it.

    Args:
        special: the tokenizer's special tokens, which grammars may name.
        num_tokens: how many it has; grammars may name them by number.
        limit_seconds: how much of a CPU's time a grammar may take.

    Attributes:
        process: the one that compiles now; None: it is started with the next grammar.
    """

    _given_up: subprocess.Popen | None = None

    def __init__(self, special: Sequence[str], num_tokens: int, limit_seconds: float = _LIMIT_SECONDS) -> None:
        self._tokens, self._limit_seconds = dict(special=list(special), num_tokens=num_tokens), limit_seconds
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def fault(self, grammar: str, schema: Any = None) -> tuple[str, str | None] | None:
        """Return what is wrong with a grammar, and the part of its schema that is at fault, if there is one; None:
        nothing is."""
        outcome = self._try(dict(grammar=grammar, gbnf=None, schema=schema))
        return None if outcome["error"] is None else (outcome["error"], outcome["path"])

    def of_gbnf(self, text: str) -> str:
        """Return llama.cpp's GBNF as a grammar, which has no fault; ValueError says what is wrong."""
        outcome = self._try(dict(grammar=None, gbnf=text, schema=None))
        if outcome["error"] is not None:
            raise ValueError(outcome["error"])
        return outcome["grammar"]

    def _try(self, what: dict[str, Any]) -> dict[str, Any]:
        """Return what the process says of a grammar."""
        asked, answer = json.dumps(what | self._tokens), ""
        with self._lock:
            has_ended = self.process is None or self.process.poll() is not None
            # Between the lock and here; looked at behind whether it has ended, which it may have by being closed.
            if self.process is not None and self.process is self._given_up:
                self._end()
                return dict(error=_CLOSED, path=None, grammar=None)
            if has_ended:
                self._start()
            process = self.process
            timer = threading.Timer(_WAIT_SECONDS, process.kill)  # it ends by itself, where the system has such limits
            timer.start()
            try:
                process.stdin.write(asked + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it has ended: the pipe is broken
                pass
            finally:
                timer.cancel()
                if not answer.endswith("\n"):  # another one must not be taken for the next grammar's
                    self._end()
        if not answer.endswith("\n"):
            is_late = process.returncode in (-signal.SIGKILL, -getattr(signal, "SIGXCPU", signal.SIGKILL))
            took = f"takes more than {self._limit_seconds:g} s" if is_late else "takes too much memory or is too deep"
            said = f"it {took} to compile: {_SIMPLER}"
            if process is self._given_up:
                said = _CLOSED
            return dict(error=said, path=None, grammar=None)
        return json.loads(answer)

    def _start(self) -> None:
        how = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        # It finds llguidance where this process does, and takes no file beside it for another module.
        paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-P", str(_SCRIPT), str(self._limit_seconds)]
        self.process = subprocess.Popen(command, env=paths, encoding="utf-8", **how)

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):  # it may be about to end, and its code says why
                process.wait(0.05)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was written is read by nobody
                    pipe.close()

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is tried now."""
        return self._lock.locked()

    def close(self) -> None:
        """End the process, whatever it compiles; the next grammar starts another one."""
        if self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()
        elif (process := self.process) is not None:  # whoever waits for its answer is told that none comes
            self._given_up = process
            process.kill()
