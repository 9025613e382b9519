"""The processes of the ranks beside this one: started, watched, and ended together.

A rank that dies, raises, or gives no sign of life ends all. The signs are given by the thread that works, between two
messages and two exchanges; who only waits for a message gives them, too.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nanoinfer.step.messages import decode, encode

WORKER = "nanoinfer.engine.rank"
"""The module that a rank runs."""
PATIENCE_S = 60.0
"""How long a rank may give no sign of life while others wait for it."""
_NUMBERS = struct.Struct("<qqq")
_LOOKS_S = 0.2
# Who has not looked for so long was stopped itself, by Ctrl-Z or with its container.
_STOPPED_S = 2.0
_ENDS_S = 10.0


class RankError(RuntimeError):
    """A rank has ended, or does not answer. The engine is closed: make a new one."""


class Signs:
    """When each rank has last given a sign of life, where all ranks can read and write it.

    A rank writes the time, how many messages it has taken, and whether it is in a step.
    """

    _ENTRY = 24

    def __init__(self, path: Path, size: int, is_first: bool) -> None:
        if is_first:
            path.write_bytes(bytes(size * self._ENTRY))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size * self._ENTRY)

    def give(self, rank: int, num_taken: int, is_working: bool) -> None:
        entry = _NUMBERS.pack(time.monotonic_ns(), num_taken, is_working)
        self._memory[rank * self._ENTRY : (rank + 1) * self._ENTRY] = entry

    def silence_s(self, rank: int, num_told: int) -> float:
        """How long a rank that works, or that has not taken all messages, has given no sign; 0 of any other."""
        entry = self._memory[rank * self._ENTRY : (rank + 1) * self._ENTRY]
        given, num_taken, is_working = _NUMBERS.unpack(entry)
        return (time.monotonic_ns() - given) / 1e9 if is_working or given and num_taken < num_told else 0.0


class Ranks:
    """The ranks 1, 2 and so on, each a process, with a connection to each.

    Args:
        size: how many there are, with this one.
        environment: takes a rank's number and returns what its environment has besides this one's.
        patience_s: how long a rank that works may give no sign of life.

    Attributes:
        folder: for what ranks find each other with.
        processes: the ranks 1, 2 and so on.
        on_end: called once, on another thread, when a rank has ended or is given up, so that nothing waits for it.
    """

    def __init__(self, size: int, environment: Callable[[int], dict[str, str]], patience_s: float = PATIENCE_S) -> None:
        self.size, self.patience_s, self._fault = size, patience_s, ""
        self._cause: BaseException | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="nanoinfer-ranks-")
        self.folder = Path(self._temporary.name)
        self.signs = Signs(self.folder / "signs", size, is_first=True)
        self.on_end: Callable[[], None] | None = None
        self._is_closing, self._num_told = False, 0
        self._looked = self._waits_since = time.monotonic()
        self.processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self._reading = [threading.Lock() for _ in range(1, size)]  # a message is one reader's
        paths = [one for one in sys.path if one and isinstance(one, str)]  # what else is there, Python leaves out, too
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            told = theirs.fileno(), rank, size, self.folder, os.getpid()
            command = [sys.executable, "-m", WORKER, *map(str, told)]
            own = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment(rank)
            self.processes.append(
                subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=own, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
            theirs.close()
            self._connections.append(Connection(ours.detach()))
        weakref.finalize(self, _kill, self.processes)  # of an engine that is collected, not closed
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="watch-ranks", daemon=True).start()

    def meet(self) -> Path:
        """Return a folder where all ranks can meet: no others have met there."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def tell(self, name: str, *arguments: Any) -> None:
        """Send each rank a message that it answers nothing to.

        Raises:
            RankError: a rank has ended.
        """
        message = encode((name, arguments))
        self._num_told, self._waits_since = self._num_told + 1, time.monotonic()
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            raise self.error() from self._cause

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Send each rank a message, and return what each answers. What one raises is raised here.

        Raises:
            RankError: a rank has ended, by what it was told before as well.
        """
        self.tell(name, *arguments)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return what each rank answers to the last `ask` or the start."""
        found, errors = [], []
        for rank, connection in enumerate(self._connections, 1):
            try:
                with self._reading[rank - 1]:
                    message = connection.recv_bytes()
            except (EOFError, OSError):
                raise self.error() from self._cause
            kind, value = decode(message)
            if kind == "ended":
                self._give_up(f"rank {rank} ended with {type(value).__name__}: {value}")
                raise self.error()
            (errors if kind == "raised" else found).append(value)
        if errors:
            raise errors[0]
        return found

    def error(self) -> RankError:
        """Return what has become of the ranks, once one has ended or cannot be reached."""
        for _ in range(int(_ENDS_S / _LOOKS_S)):
            if self._fault:
                break
            self._look()
            time.sleep(_LOOKS_S / 10)
        fault = self._fault or "a rank cannot be reached"
        return RankError(f"{fault}. All ranks were ended, and with them the engine: make a new one")

    @property
    def has_ended(self) -> bool:
        return bool(self._fault)

    def ends_soon(self) -> bool:
        """Whether a rank has ended, or does within a second: what fails since it has gone may fail before."""
        for _ in range(int(1 / _LOOKS_S) + 1):
            self._look()
            if self._fault:
                return True
            time.sleep(_LOOKS_S)
        return False

    def give_up(self, error: BaseException) -> RankError:
        """End all ranks, since this one cannot go on with them; return what is to be raised."""
        if not self._fault:
            self._cause = error
        self._give_up(f"rank 0 raised {type(error).__name__}: {error}")
        return self.error()

    def close(self, at_once: bool = False) -> None:
        """End all ranks. at_once: also in the midst of something; else each may finish that, for some seconds."""
        self._is_closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.close()
        end = time.monotonic() + (0.0 if at_once else _ENDS_S)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        _kill(self.processes)
        self._temporary.cleanup()

    def look(self) -> bool:
        """End all if one has ended or hangs; return whether that is to be seen again."""
        self._look()
        return not self._is_closing and not self._fault

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > _STOPPED_S:
            self._waits_since = now
        self._looked, waited = now, now - self._waits_since
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None and not self._is_closing:
                self._give_up(self._how_it_ended(rank, process))
            elif (silence := min(waited, self.signs.silence_s(rank, self._num_told))) > self.patience_s:
                self._give_up(f"rank {rank} (process {process.pid}) has given no sign of life for {silence:.0f} s")

    def _how_it_ended(self, rank: int, process: subprocess.Popen) -> str:
        """What a rank that has ended said last, or the signal that it got."""
        if said := self._said_last(rank):
            return said
        code = process.returncode
        if code >= 0:
            return f"rank {rank} (process {process.pid}) ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"rank {rank} (process {process.pid}) was ended by {name}{hint}"

    def _said_last(self, rank: int) -> str:
        """What a rank that has ended said of it; "": nothing, or somebody waits for its answer, who reads it then."""
        reading, connection = self._reading[rank - 1], self._connections[rank - 1]
        if not reading.acquire(timeout=_LOOKS_S):
            return ""
        try:
            with suppress(EOFError, OSError, ValueError):
                while connection.poll():
                    kind, value = decode(connection.recv_bytes())
                    if kind == "ended":
                        return f"rank {rank} ended with {type(value).__name__}: {value}"
        finally:
            reading.release()
        return ""

    def _give_up(self, fault: str) -> None:
        if self._fault or self._is_closing:
            return
        self._fault = fault
        _kill(self.processes)
        if self.on_end is not None:
            self.on_end()


def _watch(ranks: weakref.ref[Ranks]) -> None:
    """Look at the ranks as long as there is somebody who has them."""
    while (found := ranks()) is not None and found.look():
        del found
        time.sleep(_LOOKS_S)


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
