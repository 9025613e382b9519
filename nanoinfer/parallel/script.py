"""A script that a launcher, such as torchrun, has started several times on one machine.

Each process makes an `LLM` and calls its methods, as the others do. The first one's has the engine, which starts ranks
of its own as it does elsewhere. The others compute nothing: a call of theirs returns what the first one's returns.
Before a call runs, all compare what they were given. They meet in the launcher's store of `torch.distributed`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from nanoinfer.parallel.processes import RankError
from nanoinfer.step.messages import decode, encode

MEETS_S = 600.0
"""How long a process is waited for that has not made a call which others have made."""
_LOOKS_S = 0.001, 0.02
_numbers = itertools.count()
_leads = False


def num_launched() -> int:
    """How many processes a launcher has started, with this one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def leads() -> bool:
    """Whether the other processes that a launcher has started follow this one."""
    return _leads


class Script:
    """What one of the processes has to do with the others, for one `LLM`.

    Args:
        store: where they meet.
        rank, size: which process this is, of how many.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self._size = store, rank, size
        self._calls, self._is_within = itertools.count(), False

    @classmethod
    def begun(cls, tensor_parallel_size: int) -> Script | None:
        """Return the part of this process; None: it is alone, or each process has an engine of its own.

        Raises:
            ValueError: there are not as many processes as ranks, or they run on several machines.
        """
        global _leads
        if num_launched() == 1 or tensor_parallel_size == 1:
            return None
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or num_launched())
        if not num_launched() == local == tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} in a script that a launcher has started "
                f"{num_launched()} times, {local} of them on this machine: start it as many times as there are ranks, "
                "all on one machine, or once, with python: the engine starts its ranks itself"
            )
        store, rank, size = next(dist.rendezvous("env://"))
        _leads = rank == 0
        return cls(dist.PrefixStore(f"nanoinfer/{next(_numbers)}", store), rank, size)

    def call(self, name: str, arguments: Any, method: Callable[[], Any]) -> Any:
        """Return what `method` returns in the first process, or raise what it raises there.

        Raises:
            ValueError: another process calls something else, or gives it something else.
            RankError: a process does not come.
        """
        if self._is_within:
            return method()
        number = next(self._calls)
        self._agree(number, name, arguments)
        if self.rank:
            found = self._read(f"{number}/0")
            self._done(number, 1)
            return self._given(found)
        self._is_within = True
        try:
            value = method()
            self._say(f"{number}/0", value)
        except BaseException as error:
            self._say(f"{number}/0", error)
            raise
        finally:
            self._is_within = False
            self._done(number, 1)
        return value

    def stream(self, name: str, arguments: Any, method: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """As `call`, of what a generator yields."""
        number, count = next(self._calls), 0
        self._agree(number, name, arguments)
        if self.rank:
            while (found := self._read(f"{number}/{count}")) is not None:
                count += 1
                yield self._given(found)
            self._done(number, count + 1)
            return
        try:
            for output in method():
                self._say(f"{number}/{count}", output)
                count += 1
                yield output
        except Exception as error:
            self._say(f"{number}/{count}", error)
            count += 1
            raise
        finally:
            self._say(f"{number}/{count}", None)
            self._done(number, count + 1)

    def _agree(self, number: int, name: str, arguments: Any) -> None:
        digest = hashlib.blake2b(json.dumps(_plain(arguments)).encode(), digest_size=8).hexdigest()
        self._store.set(f"{number}/asked/{self.rank}", f"{name}, digest {digest}")
        end = time.monotonic() + MEETS_S
        asked = [self._wait(f"{number}/asked/{rank}", end, rank).decode() for rank in range(self._size)]
        for rank, other in enumerate(asked):
            if other != asked[0]:
                raise ValueError(
                    "the processes of one script must make the same calls, with the same prompts and parameters: rank "
                    f"0 calls {asked[0]} of what it was given, rank {rank} {other}"
                )

    def _say(self, key: str, value: Any) -> None:
        self._store.set(key, encode(value))

    def _read(self, key: str) -> Any:
        return decode(self._wait(key, None, 0))

    @staticmethod
    def _given(found: Any) -> Any:
        if isinstance(found, BaseException):
            raise found
        return found

    def _wait(self, key: str, end: float | None, rank: int) -> bytes:
        """Wait for a value, in steps, so that Ctrl-C ends it."""
        pause, longest = _LOOKS_S
        while not self._store.check([key]):
            if end is not None and time.monotonic() > end:
                raise RankError(f"rank {rank} of the script has not made the call for {MEETS_S:.0f} s that others made")
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._store.get(key)

    def _done(self, number: int, count: int) -> None:
        """Who is the last to have read a call's values takes them out of the store."""
        if self._store.add(f"{number}/done", 1) == self._size:
            keys = [*map(str, range(count)), *(f"asked/{rank}" for rank in range(self._size)), "done"]
            for key in keys:
                self._store.delete_key(f"{number}/{key}")


def together(method: Callable) -> Callable:
    """A method of `LLM` that all processes of a script call, and the first one runs."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._script is None:
            return method(self, *args, **kwargs)
        return self._script.call(method.__name__, [args, kwargs], lambda: method(self, *args, **kwargs))

    return call


def together_in_turns(method: Callable) -> Callable:
    """As `together`, of a generator."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self._script is None:
            return method(self, *args, **kwargs)
        return self._script.stream(method.__name__, [args, kwargs], lambda: method(self, *args, **kwargs))

    return call


def _plain(value: Any) -> Any:
    """What is compared of a value: contents where it has some, else its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    if isinstance(value, list | tuple | range):
        return [*map(_plain, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
