"""Devices, and the memory that is taken on them."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass

import torch

from nanoinfer.common.units import GIB, format_gib
from nanoinfer.execution.memory import reserved_bytes

# What a process takes of the GPU beside torch's allocator once its context is there: code of kernels and libraries, and
# the nodes of graphs.
OUTSIDE_BYTES = 192 * 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at this moment, in bytes: in all, free for anybody, and held by torch in this process."""

    total_bytes: int
    free_bytes: int
    own_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """The most that a new engine may take."""
        return max(0, self.free_bytes - OUTSIDE_BYTES)

    def largest_limit(self) -> str:
        """Return `usable_bytes` as a limit that can be given, such as "10.9GiB"."""
        return f"{self.usable_bytes * 10 // GIB / 10:.1f}GiB"

    def holders(self) -> str:
        """Return who has what is not free, as far as this process can tell."""
        others = self.total_bytes - self.free_bytes - self.own_bytes
        found = (
            f"{format_gib(others)} GiB are held by the driver and by what else runs on the GPU, such as a desktop, a "
            "browser or another model's server (nvidia-smi lists them)"
        )
        if self.own_bytes >= 0.01 * GIB:
            found += f", {format_gib(self.own_bytes)} GiB by this process, such as an LLM that is not closed"
        return found


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
    if device.type == "cpu" and device.index is not None:
        raise ValueError(f'device={name!r}, but there is one CPU: give "cpu", without a number')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"device={name!r}, but torch sees {count} CUDA devices: give "
                + (f'"cuda:0" to "cuda:{count - 1}"' if count else '"cpu" or "auto", or install a CUDA build of torch')
            )
        device = torch.device("cuda", device.index or 0)
    return device


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return what the GPU has and what of it is free now; None for the CPU. What is unused is given back first."""
    if device.type != "cuda":
        return None
    gc.collect()  # of an engine that was dropped and not closed
    own = reserved_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes=total, free_bytes=free, own_bytes=own)


def advice_when_full(message: str) -> str | None:
    """Return what to do about an error with this message, if it says that the GPU's memory is full; else None."""
    if "out of memory" not in message and "ALLOC_FAILED" not in message:
        return None
    wanted, place = re.search(r"Tried to allocate ([\d.]+ \w+)", message), re.search(r"GPU (\d+)", message)
    what = f"{wanted[1]} more were wanted" if wanted else message.splitlines()[0].rstrip(".")
    said = f"the GPU's memory is full: {what}"
    others = "max_num_batched_tokens or max_num_seqs, or end what else runs on the GPU"
    if not torch.cuda.is_available():
        return f"{said}: lower gpu_memory_limit, {others}"
    now = device_memory(torch.device("cuda", int(place[1]) if place else torch.cuda.current_device()))
    # What this process holds is free for its next run.
    there = DeviceMemory(now.total_bytes, now.free_bytes + now.own_bytes)
    return (
        f"{said}, and without this process {format_gib(there.free_bytes)} of {format_gib(there.total_bytes)} GiB are "
        f'free; {there.holders()}: set gpu_memory_limit to at most "{there.largest_limit()}", lower {others}'
    )
