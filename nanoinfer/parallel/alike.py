"""What ranks must have alike before they begin, and which device each has."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from nanoinfer.common.launched import num_launched
from nanoinfer.common.units import GIB, counted
from nanoinfer.devices.registry import device_of
from nanoinfer.parallel.script import leads

UNEVEN_BYTES = 2 * GIB
"""Free memory of two GPUs may differ by so much."""


def hash_of(value: Any) -> str:
    """Return what is the same for equal values alone."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


_OF_PRODUCTS = (
    "fp32_precision", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)  # fmt: skip


def settings() -> list:
    """Return what a program may have set in torch, in this process alone, that changes bits."""
    return [torch.get_num_threads(), *(getattr(torch.backends.cuda.matmul, name) for name in _OF_PRODUCTS)]


def set_alike(given: list) -> None:
    """Set what rank 0's process has set."""
    num_threads, *of_products = given
    torch.set_num_threads(num_threads)
    for name, value in zip(_OF_PRODUCTS, of_products, strict=True):
        setattr(torch.backends.cuda.matmul, name, value)


def check_alike(facts: list[list], allow_uneven: bool = False) -> None:
    """Compare what ranks have said, rank 0 first: pairs of what it is and what it is there, and memory.

    Raises:
        ValueError: they differ; the message has the values of both.
    """
    (first, _, memory, _), *others = facts
    for rank, (same, _, other_memory, _) in enumerate(others, 1):
        for (name, value), (_, other) in zip(first, same, strict=True):
            if value != other:
                raise ValueError(f"ranks must have the same {name}: rank 0 has {value}, rank {rank} {other}")
        if memory is not None and not allow_uneven and abs(memory - other_memory) > UNEVEN_BYTES:
            free = [f"rank {number}: {one / GIB:.1f} GiB" for number, (_, _, one, _) in enumerate(facts)]
            raise ValueError(
                f"the GPUs have unlike free memory ({', '.join(free)}), and each rank takes as much: end what else "
                "runs on them, or give allow_uneven=True: the least counts"
            )


def check_devices(size: int, device: str, place: torch.device) -> None:
    """Raise ValueError if there are not as many devices as ranks, if another one than the first is asked for, or if a
    launcher has started several processes."""
    if num_launched() > 1 and not leads():
        raise ValueError(
            f"tensor_parallel_size={size} under torchrun, or another launcher that has set WORLD_SIZE: an engine "
            "starts its ranks itself. Run the command with python, or make an LLM in a script, which may be launched"
        )
    if ":" in device or place.index:
        raise ValueError(
            f"device={device!r} with tensor_parallel_size={size} is {place} here, and ranks take the GPUs from the "
            "first on: name others with the environment variable CUDA_VISIBLE_DEVICES, and leave out set_device"
        )
    described = device_of(place)
    if described.is_host:
        return
    if size > (count := described.count()):
        raise ValueError(f"tensor_parallel_size={size} exceeds the {counted(count, 'GPU')} here: give at most {count}")
