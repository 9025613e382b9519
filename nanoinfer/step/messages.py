"""Messages between the side that plans and the side that computes: a text in JSON, then the bytes of its arrays.

Nothing is unpickled: what comes is numbers, texts, arrays, and objects of the few classes that are named here, of which
each is made of its fields.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np

from nanoinfer.common.errors import RequestError, UnknownNameError
from nanoinfer.models.expert_slots import SlotCounts
from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.settings import RowSampling
from nanoinfer.step.executor import ExecutorCounters
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.step.plan import PromptChunk, StepPlan
from offload.memory.pinned import PinError

_STEPS = StepPlan, PromptChunk, RowSampling, TokenLimits, ExecutorCounters, SlotCounts, MemoryPlan
_OUTPUTS = RequestOutput, CompletionOutput, StreamOutput, RequestMetrics, Logprob
CLASSES = {one.__name__: one for one in (*_STEPS, *_OUTPUTS)}
"""Of the objects that cross."""
ERRORS = {"PinError": PinError, "UnknownNameError": UnknownNameError}
"""Of the exceptions that cross, beside Python's own."""


def encode(value: Any) -> bytes:
    """Return the message that says this value: made of None, truths, numbers, texts, lists, tuples, sets, dicts,
    arrays, exceptions and objects of `CLASSES`.

    Raises:
        TypeError: something else is in it.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_said(value, arrays)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)])


def decode(message: bytes) -> Any:
    """Return the value that `encode` was given; an exception as the nearest known class above its own, or as a
    RuntimeError that names it."""
    begin = 8 + int.from_bytes(message[:8], "little")
    return _Reader(message, begin).value(json.loads(message[8:begin]))


def _said(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is list:
        return [_said(one, arrays) for one in value]
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": [value.dtype.str, value.shape]}
    if isinstance(value, BaseException):
        own = {name: _said(one, arrays) for name, one in vars(value).items()} if isinstance(value, RequestError) else {}
        names = [kind.__name__ for kind in type(value).__mro__]
        return {"error": [names, str(value), own]}
    if isinstance(value, dict):
        return {"dict": [[_said(key, arrays), _said(one, arrays)] for key, one in value.items()]}
    if type(value) is CLASSES.get(type(value).__name__):
        names = value._asdict() if isinstance(value, tuple) else [field.name for field in fields(value)]
        return {type(value).__name__: [_said(getattr(value, name), arrays) for name in names]}
    for name, kind in (("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return {name: [_said(one, arrays) for one in value]}
    raise TypeError(f"a {type(value).__name__} cannot be sent: {value!r}")


class _Reader:
    """Reads a message's arrays, one behind the other."""

    def __init__(self, message: bytes, begin: int) -> None:
        self._message, self._at = message, begin
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "array": self._array,
            "error": self._error,
            "dict": lambda pairs: {self.value(key): self.value(one) for key, one in pairs},
            "tuple": lambda several: tuple(map(self.value, several)),
            "set": lambda several: set(map(self.value, several)),
        }

    def value(self, said: Any) -> Any:
        if isinstance(said, list):
            return [*map(self.value, said)]
        if not isinstance(said, dict):
            return said
        ((kind, what),) = said.items()
        return self._kinds[kind](what) if kind in self._kinds else self._object(CLASSES[kind], what)

    def _object(self, kind: type, values: list[Any]) -> Any:
        if issubclass(kind, tuple):
            return kind(*map(self.value, values))
        return kind(**{field.name: self.value(one) for field, one in zip(fields(kind), values, strict=True)})

    def _array(self, what: tuple[str, list[int]]) -> np.ndarray:
        kind, shape = np.dtype(what[0]), what[1]
        array = np.frombuffer(self._message, kind, int(np.prod(shape)), self._at).reshape(shape)
        self._at += array.nbytes
        return array.copy()  # which can be written to

    def _error(self, what: tuple[list[str], str, dict[str, Any]]) -> BaseException:
        names, text, own = what
        if own:
            return RequestError(text, **{key: self.value(one) for key, one in own.items()})
        for kind in (ERRORS.get(name) or getattr(builtins, name, None) for name in names):
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
                with suppress(TypeError):  # some are made of more than a text
                    return kind(text)
        return RuntimeError(f"{names[0]}: {text}")
