"""Devices, and the memory that is taken on them."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> torch.device:
    """Return the torch device that `name` asks for; ValueError if it is none, or CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device={name!r} is no device: give "auto", "cuda", "cuda:1" or "cpu"') from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f'device={name!r} is not supported: give "auto", "cuda", "cuda:1" or "cpu"')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"device={name!r}, but torch sees {count} CUDA devices: give "
                + (f'"cuda:0" to "cuda:{count - 1}"' if count else '"cpu" or "auto", or install a CUDA build of torch')
            )
        device = torch.device("cuda", device.index or 0)
    return device


def reserved_bytes(device: torch.device) -> int:
    """Give unused caches back; return the bytes that torch's allocator still holds on the device, 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
