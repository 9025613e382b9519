"""The tensors of a module, and memory that they move to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin in a run, as torch's allocator has it on a GPU."""
# There, tensors of so many bytes and more have segments of their own, in whole multiples of this.
_LEAST_ALONE, _SEGMENT = 10 * 2**20, 2 * 2**20


def aligned_begins(module: nn.Module) -> tuple[dict[int, int], int]:
    """Return where each of a module's own tensors begins in a run of all, by its storage's address; the run's bytes."""
    begins, end = {}, 0
    for tensor in module.parameters(recurse=False):
        begins[tensor.untyped_storage().data_ptr()] = end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return begins, end


def weight_sizes(model: nn.Module) -> dict[str, int]:
    """Return `weight_bytes` and `segment_bytes` of a `ModelSpec`."""
    sizes = [weight.nbytes for weight in model.parameters()]
    return dict(weight_bytes=sum(sizes), segment_bytes=sum(-size % _SEGMENT for size in sizes if size >= _LEAST_ALONE))


def move_tensors(module: nn.Module, begins: Mapping[int, int], memory: Tensor) -> None:
    """Make a module's tensors views into other memory of their device; what they hold is lost.

    begins: of each tensor's storage, by its address, the first byte in `memory`, [bytes] uint8.
    """
    with torch.no_grad():
        for tensor in _tensors(vars(module)):
            begin = begins.get(tensor.untyped_storage().data_ptr())
            if begin is not None:
                begin += memory.storage_offset() + tensor.storage_offset() * tensor.element_size()
                where = begin // tensor.element_size(), tensor.shape, tensor.stride()
                tensor.set_(memory.untyped_storage(), *where)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's attributes, and of the plain objects that hold some of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, SimpleNamespace):
        yield from _tensors(vars(value))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
