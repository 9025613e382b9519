"""The toy's operations: the functions of `nanoinfer.kernels.reference`, computed on its memory. The norm is its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from nanoinfer.kernels import reference
from toy_device.tensors import computed

calls: dict[str, int] = {}
"""How often each operation was called."""


def _on_memory(compute: Callable) -> Callable:
    @wraps(compute)
    def operation(*args: Any, **kwargs: Any) -> Any:
        calls[compute.__name__] = calls.get(compute.__name__, 0) + 1
        return computed(compute, args, kwargs)

    return operation


for _name, _compute in inspect.getmembers(reference, inspect.isfunction):
    globals()[_name] = _on_memory(_compute)


@_on_memory
def rms_norm(x, weight, eps, *, offset, rounds_once=False, other=None, out=None, factor=None):
    """As the reference's in float64: another rounding than any other device has."""
    if other is not None:
        other = other if other.dim() == x.dim() else sum(other.unbind()).to(x.dtype)
        x += other if factor is None else other * factor
    wide = x.double()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    result = (normed * (weight.double() + offset)).to(x.dtype)
    return result if out is None else out.copy_(result)
