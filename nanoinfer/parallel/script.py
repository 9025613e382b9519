"""A script that a launcher, such as torchrun, has started several times on one machine.

Each process makes an `LLM` and calls its methods, as the others do. The first one's has the engine, which starts ranks
of its own as it does elsewhere. The others compute nothing: a call of theirs returns what the first one's returns.
Before a call runs, all compare what they were given. They meet in the launcher's store of `torch.distributed`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist

from nanoinfer.common.launched import num_launched
from nanoinfer.parallel.processes import RankError
from nanoinfer.step.messages import decode, encode

MEETS_S = 600.0
"""How long a process is waited for that has not made a call which others have made."""
PIECE_BYTES = 4 * 2**20
"""Of a value, at a time: the store takes 8 MiB at most."""
_LOOKS_S = 0.001, 0.02
_CALLED = {"_start": "LLM", "_sampling_defaults": "get_default_sampling_params"}
# What is only shown, and by the first process alone.
_SHOWN = {"progress_bar", "use_tqdm"}
_NEEDED = "RANK", "MASTER_ADDR", "MASTER_PORT"
_numbers = itertools.count()
_leads = False


def leads() -> bool:
    """Whether the other processes that a launcher has started follow this one."""
    return _leads


class Script:
    """What one of the processes has to do with the others, for one `LLM`.

    Args:
        store: where they meet.
        rank, size: which process this is, of how many.
        hosts: whether the store ends with this process.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, hosts: bool = False) -> None:
        self._store, self.rank, self._size, self._hosts = store, rank, size, hosts
        self._calls, self._is_within = itertools.count(), False

    @classmethod
    def begun(cls, tensor_parallel_size: int) -> Script | None:
        """Return the part of this process; None: it is alone, or each process has an engine of its own.

        Raises:
            ValueError: there are not as many processes as ranks, they run on several machines, or do not come.
        """
        global _leads
        if tensor_parallel_size == 1 or num_launched() == 1:
            return None
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or num_launched())
        if not num_launched() == local == tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} in a script that a launcher has started "
                f"{num_launched()} times, {local} of them on this machine: start it as many times as there are ranks, "
                "all on one machine, or once, with python: the engine starts its ranks itself"
            )
        store, rank, size = _rendezvous()
        _leads = rank == 0
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        return cls(dist.PrefixStore(f"nanoinfer/{next(_numbers)}", store), rank, size, hosts)

    def call(self, name: str, arguments: Mapping[str, Any], method: Callable[[], Any]) -> Any:
        """Return what `method` returns in the first process, or raise what it raises there.

        arguments: by their names.

        Raises:
            ValueError: another process calls something else, or gives it something else.
            RankError: a process does not come.
        """
        if self._is_within:
            return method()

        def once() -> Iterator[Any]:
            yield method()

        (value,) = self.stream(name, arguments, once)
        return value

    def stream(self, name: str, arguments: Mapping[str, Any], method: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """As `call`, of what a generator yields."""
        number = self._agree(name, arguments)
        place, left = 0, RuntimeError(f"rank 0 of the script has left {name} before its end, and this process has not")
        if self.rank:
            try:
                while (found := self._read(number, place))[0] is not None:
                    (output,), place = found
                    yield output
            finally:
                self._done(number)
            return
        outputs, end = method(), left
        try:
            while (output := self._next(outputs)) is not None:
                place = self._say(number, place, output)
                yield output[0]
            end = None
        except Exception as error:
            end = error
            raise
        finally:
            self._store.set(f"{number}/said", str(self._say(number, place, end)))
            self._done(number, waits=self._hosts and end is not left)

    def leave(self) -> None:
        """Say to the others that this process calls nothing any more; wait for nobody."""
        with suppress(RuntimeError):  # the store may have ended with the first process
            self._ask(next(self._calls), "close", {})

    def _next(self, outputs: Iterator[Any]) -> list[Any] | None:
        """Return what the method yields next, in a list; None: nothing. What it calls itself is no call of a script."""
        self._is_within = True
        try:
            return [next(outputs)]
        except StopIteration:
            return None
        finally:
            self._is_within = False

    def _ask(self, number: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._store.set(f"{number}/asked/{self.rank}", json.dumps([name, _digests(arguments)]))

    def _agree(self, name: str, arguments: Mapping[str, Any]) -> int:
        """Return the number of a call that all make."""
        number, name = next(self._calls), _CALLED.get(name, name)
        self._ask(number, name, arguments)
        end = time.monotonic() + MEETS_S
        asked = []
        for rank in range(self._size):
            missing = f"rank {rank} of the script has not called {name} for {MEETS_S:.0f} s: all processes have to"
            asked.append(json.loads(self._wait(f"{number}/asked/{rank}", end, missing)))
        for rank, (called, given) in enumerate(asked):
            if [called, given] == asked[0]:
                continue
            said = f"rank 0 calls {asked[0][0]}, rank {rank} {called}"
            if called == asked[0][0]:
                unlike = [one for one in given | asked[0][1] if given.get(one) != asked[0][1].get(one)]
                said = f"of {called}, rank {rank} has another {' and '.join(unlike)} than rank 0"
            raise ValueError(
                f"the processes of one script must make the same calls, with the same prompts and parameters: {said}"
            )
        return number

    def _say(self, number: int, place: int, value: Any) -> int:
        """Leave a value in pieces from a place on, and return the place behind them. The first says how many there are.

        It is there when all others are: who waits for it never sees a part.
        """
        message = encode(value)
        pieces = [message[begin : begin + PIECE_BYTES] for begin in range(0, len(message), PIECE_BYTES)]
        pieces[0] = len(pieces).to_bytes(8, "little") + pieces[0]
        for index in reversed(range(len(pieces))):
            self._store.set(f"{number}/{place + index}", pieces[index])
        return place + len(pieces)

    def _read(self, number: int, place: int) -> tuple[Any, int]:
        """Return the value at a place, and the place behind it; raise it if it is an exception."""
        first = self._wait(f"{number}/{place}")
        end = place + int.from_bytes(first[:8], "little")
        others = [self._store.get(f"{number}/{one}") for one in range(place + 1, end)]
        value = decode(b"".join([first[8:], *others]))
        if isinstance(value, BaseException):
            raise value
        return value, end

    def _wait(self, key: str, end: float = math.inf, missing: str = "") -> bytes:
        """Wait for a value, in steps, so that Ctrl-C ends it. missing: what is said if it has not come until `end`."""
        pause, longest = _LOOKS_S
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise RankError(missing)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._store.get(key)

    def _done(self, number: int, waits: bool = False) -> None:
        """Who is the last to need a call's values takes them out of the store. waits: until somebody has."""
        if self._store.add(f"{number}/done", 1) == self._size:
            places = range(int(self._store.get(f"{number}/said")))
            asked = (f"asked/{rank}" for rank in range(self._size))
            for key in (*places, *asked, "said", "done"):
                self._store.delete_key(f"{number}/{key}")
        end = time.monotonic() + MEETS_S
        while waits and self._store.check([f"{number}/done"]) and time.monotonic() < end:
            time.sleep(_LOOKS_S[0])


def together(method: Callable) -> Callable:
    """A method of `LLM` that all processes of a script call, and the first one runs."""
    return _shared(method, Script.call)


def together_in_turns(method: Callable) -> Callable:
    """As `together`, of a generator."""
    return _shared(method, Script.stream)


def _shared(method: Callable, way: Callable) -> Callable:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._script is None:
            return method(self, *args, **kwargs)
        try:
            given = inspect.signature(method).bind(None, *args, **kwargs).arguments
        except TypeError:
            return method(self, *args, **kwargs)  # says what is wrong
        return way(self._script, method.__name__, given, lambda: method(self, *args, **kwargs))

    return call


@cache  # where the first process has the store, it would end between two LLMs
def _rendezvous() -> tuple[dist.Store, int, int]:
    """Return the launcher's store, and which of how many processes this is. Ctrl-C ends the wait for it.

    Raises:
        ValueError: the launcher has not said where processes meet, or they do not come.
    """
    said = f"WORLD_SIZE={num_launched()} says that a launcher has started so many processes"
    do = "start the script with torchrun, or unset WORLD_SIZE: the engine starts its ranks itself"
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise ValueError(f"{said}, and {' and '.join(missing)} is not set: {do}")
    found: list = []

    def meet() -> None:
        try:
            found.extend(next(dist.rendezvous("env://", timeout=timedelta(seconds=MEETS_S))))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOKS_S[1])
    if isinstance(found[0], Exception):
        where = ":".join(os.environ[name] for name in _NEEDED[1:])
        raise ValueError(f"{said}, and they have not met at {where}: {do}") from found[0]
    return tuple(found)


def _digests(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what is compared of a call's arguments: of a config each field, but for what is only shown."""
    given = {}
    for name, value in arguments.items():
        given |= vars(value) if name == "config" else {name: value}
    texts = {name: json.dumps(_plain(value)) for name, value in given.items() if name not in {*_SHOWN, "self"}}
    return {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}


def _plain(value: Any) -> Any:
    """What is compared of a value: contents where it has some, else its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    if isinstance(value, list | tuple | range):
        return [*map(_plain, value)]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(one)) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
