"""torch's side of the toy: the device type "toy", in Python. Packages of real devices have this in their torch plugin.

A tensor of the toy wraps one of the CPU, its memory. Whatever looks at that from outside, such as `numpy`, fails, as it
does for a device with memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")
TOY = torch.device("toy", 0)
_aten = torch.ops.aten


class ToyTensor(torch.Tensor):
    """A tensor on the toy. memory: the tensor of the CPU that it is."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> ToyTensor:
        layout = dict(strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype)
        made = torch.Tensor._make_wrapper_subclass(cls, memory.size(), **layout, device=TOY)
        made.memory = memory
        return made

    def tolist(self) -> Any:
        return self.memory.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None) -> Any:
        return _run(function, *args, **(kwargs or {}))


def on_host(value: Any) -> Any:
    """Return the memory of a tensor of the toy, the CPU for the toy itself, and so for what lists and tuples hold."""
    kind = type(value)
    if kind is ToyTensor or kind is Parameter and isinstance(value, ToyTensor):
        return value.memory
    if kind is torch.device:
        return torch.device("cpu") if value.type == TOY.type else value
    if kind is list or kind is tuple:
        return kind(on_host(one) for one in value)
    return value


def computed(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function with the memory of what is given. What it returns of that stays the same object.

    Return its result on the toy, but for numbers.
    """
    same: dict[int, ToyTensor] = {}
    pending = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, ToyTensor):
            same[id(value.memory)] = value
        elif isinstance(value, list | tuple):
            pending += value
    found = function(*map(on_host, args), **{name: on_host(value) for name, value in kwargs.items()})

    def on_toy(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(on_toy, value))
        if not isinstance(value, torch.Tensor):
            return value
        return same[id(value)] if id(value) in same else ToyTensor(value)

    return on_toy(found)


def _run(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compute what torch is asked for, on the memory; copies to the CPU end there."""
    wanted = kwargs.get("device")
    is_copy_to_host = function is _aten.copy_.default and not isinstance(args[0], ToyTensor)
    if is_copy_to_host or (wanted is not None and wanted.type != TOY.type):
        return function(*map(on_host, args), **{name: on_host(value) for name, value in kwargs.items()})
    return computed(function, args, kwargs)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")


def tensor(data: Any, *, device: Any = None, make: Callable = torch.tensor, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which devices that are written in Python do not have (as of torch 2.13)."""
    if device is None or torch.device(device).type != TOY.type:
        return make(data, device=device, **options)
    return make(data, **options).to(TOY)
