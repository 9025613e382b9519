"""A rank beside the engine's process: `python -m nanoinfer.engine.rank`, which `parallel.processes` starts.

It has no request and plans nothing: it loads its share of the model and does what rank 0 says, in that order.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import resolve_device
from nanoinfer.engine.start import Share, known
from nanoinfer.execution.group import Group
from nanoinfer.execution.local import LocalExecutor
from nanoinfer.kernels.linear.shard import Shard
from nanoinfer.parallel.alike import set_alike
from nanoinfer.parallel.processes import Signs
from nanoinfer.step.messages import decode, encode

_LOOKS_S = 1.0
_LEAVES_S = 0.05
# How long a message is waited for before another sign of life is given.
_WAITS_S = 5.0
# Loading, compiling and capturing take as long as they take, and so does pinning, which rank 0 waits for, too.
_TAKE_THEIR_TIME = ("capture", "open_host_pool?", "wait_for?")


class Rank:
    """What a rank answers: methods of the executor and of the start, by name.

    Args:
        connection: to rank 0.
        folder: with the signs of life.
    """

    def __init__(self, connection: Connection, shard: Shard, folder: Path) -> None:
        self._connection, self._shard = connection, shard
        self._signs = Signs(folder / "signs", shard.size, is_first=False)
        self._place: torch.device | None = None
        self._share: Share | None = None
        self._num_taken, self._is_working = 0, False
        self._executor: LocalExecutor | None = None
        self._group: Group | None = None

    def run(self) -> None:
        """Do what is said, until there is nobody who says it, or it is to end."""
        while True:
            self._sign(False)
            while not self._connection.poll(_WAITS_S):
                self._sign(False)
            name, arguments = decode(self._connection.recv_bytes())
            self._num_taken += 1
            self._sign(self._executor is not None and name not in _TAKE_THEIR_TIME)
            self._do(name, arguments)

    def _sign(self, is_working: bool) -> None:
        self._is_working = is_working
        self._signs.give(self._shard.rank, self._num_taken, is_working)

    def _do(self, name: str, arguments: tuple) -> None:
        is_asked = name.endswith("?")
        own = {"place?": self._find_place, "join?": self._join, "known?": self._known, "build?": self._build}
        work = (own | {"sample": self._sample, "close": self._close}).get(name)
        if not is_asked:
            (work or getattr(self._executor, name))(*arguments)
            return
        try:
            answer = "done", (work or getattr(self._executor, name[:-1]))(*arguments)
        except Exception as error:
            if name in ("join?", "build?"):  # the others wait for what this rank would exchange with them
                raise
            answer = "raised", error
        self._connection.send_bytes(encode(answer))

    def _find_place(self, device: str, settings: list) -> None:
        set_alike(settings)
        self._place = resolve_device(device)

    def _join(self, folder: str) -> None:
        self._group = Group(Path(folder), self._shard.rank, self._shard.size, self._place)
        self._group.on_exchange = lambda: self._sign(self._is_working)

    def _close(self) -> None:
        self._executor.close()
        self._group.close()
        self._executor = self._group = self._share = None

    def _known(self, settings: dict[str, Any]) -> list:
        config = EngineConfig(**settings)
        self._share = known(config, self._place, self._shard)
        return self._share.facts(self._group)

    def _build(self, plan) -> list[int]:
        plan = replace(plan, groups=self._share.setup.spec.kv_groups)
        self._executor = self._share.build(plan, self._group)
        return self._share.sizes(self._executor)

    def _sample(self, number: int, masks, is_changed: bool) -> None:
        self._executor.sample(number, masks, self._group.take_of_first if is_changed else None)


def main(arguments: list[str]) -> None:
    """Run a rank. arguments: the descriptor of the connection, the rank's number, how many there are, their folder,
    the process of rank 0."""
    descriptor, rank, size = map(int, arguments[:3])
    connection, folder, parent = Connection(descriptor), Path(arguments[3]), int(arguments[4])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    warnings.simplefilter("ignore")  # rank 0 says it
    try:
        with torch.inference_mode():
            Rank(connection, Shard(rank, size), folder).run()
    except (EOFError, ConnectionError, KeyboardInterrupt):  # rank 0 has ended, or needs it no more
        if os.getppid() == parent:
            time.sleep(_LEAVES_S)  # of who was killed the connection ends first
        _clear(folder, parent)
        os._exit(0)  # threads of libraries are not waited for
    except BaseException as error:
        with suppress(OSError):
            connection.send_bytes(
                encode(("ended", error if isinstance(error, Exception) else RuntimeError(str(error))))
            )
        os._exit(1)  # what waits for an exchange would wait on


def _end_with(parent: int, folder: Path) -> None:
    """End this process where rank 0 has ended, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    _clear(folder, parent)
    os._exit(1)


def _clear(folder: Path, parent: int) -> None:
    """Remove the folder of a rank 0 that was killed; else it does so itself."""
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
