"""From a device's name to its description. Those that other packages bring are entry points of `nanoinfer.devices`.

The name of an entry point is torch's name of the device, and its object a class derived from `Device`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata

import torch

from nanoinfer.common.errors import did_you_mean
from nanoinfer.devices.base import Device
from nanoinfer.devices.cpu import CpuDevice, MetaDevice
from nanoinfer.devices.cuda import CudaDevice
from nanoinfer.devices.target import Target

GROUP = "nanoinfer.devices"
_OWN: dict[str, type[Device]] = {"cuda": CudaDevice, "cpu": CpuDevice, "meta": MetaDevice}
_NAMES = ("cuda", "cpu")


def resolve_device(name: str) -> torch.device:
    """Return the torch device that `name` asks for, such as "cuda:1"; ValueError if there is none of it.

    "auto" is the first one that there is: a GPU, a device of another package, the CPU.
    """
    if name == "auto":
        return next(described.current() for described in _by_choice() if described.is_available())
    kind, _, number = name.partition(":")
    described, is_number = class_of(kind) if kind != MetaDevice.kind else None, number.isdecimal()
    if described is None or number and not is_number or name.endswith(":"):
        allowed = ["auto", "cuda", "cuda:1", "cpu", *_others()]
        listed = ", ".join(f'"{one}"' for one in allowed[:-1])
        guess = did_you_mean(kind, (*_NAMES, *_others()))
        raise ValueError(f'device={name!r} is no device here: give {listed} or "{allowed[-1]}"{guess}')
    return described.find(int(number) if is_number else None)


@cache
def device_of(device: torch.device) -> Device:
    """Return the description of a device."""
    described = class_of(device.type)
    assert described is not None, f"no package describes {device}"
    return described(device)


@cache
def target_of(device: torch.device) -> Target:
    """Return what our kernels may count on there. Each launch asks, so the answer is kept."""
    return device_of(device).target


def class_of(kind: str) -> type[Device] | None:
    """Return who describes devices of this kind: ours, or a package's, which is imported now."""
    if kind in _OWN:
        return _OWN[kind]
    point = next(iter(metadata.entry_points(group=GROUP, name=kind)), None)
    if point is None:
        return None
    described = point.load()
    assert issubclass(described, Device) and described.kind == kind, f"{point.value} describes no {kind!r}"
    return described


def brought_backends() -> list[str]:
    """Return the names of the attention backends that devices of other packages bring, which are imported now."""
    return [name for kind in _others() for name in class_of(kind).attention_backends]


def planned_device() -> Device:
    """Return the description of what `nanoinfer.plan` plans for, whatever this machine has: `memory/cards.toml`."""
    return device_of(torch.device("cuda"))


def accelerator() -> torch.device | None:
    """Return the device of this machine that "auto" means, or None if that is the host itself."""
    described = device_of(resolve_device("auto"))
    return None if described.is_host else described.torch_device


def _others() -> list[str]:
    return sorted(point.name for point in metadata.entry_points(group=GROUP))


def _by_choice() -> Iterator[type[Device]]:
    yield CudaDevice
    yield from map(class_of, _others())
    yield CpuDevice
