"""The memory of devices, and what is taken of it."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, replace

import torch

from nanoinfer.common.units import GIB, format_gib
from nanoinfer.devices.registry import accelerator, device_of

# What a process takes of the GPU beside torch's allocator once its context is there: code of kernels and libraries and
# the nodes of graphs; and for each core the memory of its threads, of kernels that have more numbers than registers.
# Measured on an H200: 254 MiB, of 132 cores.
OUTSIDE_BYTES, OUTSIDE_BYTES_PER_CORE = 160 * 2**20, 3 * 2**18


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at this moment, in bytes: in all, free for anybody, and held by torch in this process.

    num_cores: of the GPU, its streaming multiprocessors.
    """

    total_bytes: int
    free_bytes: int
    own_bytes: int = 0
    num_cores: int = 0

    @property
    def outside_bytes(self) -> int:
        """What an engine takes beside its limit."""
        return OUTSIDE_BYTES + self.num_cores * OUTSIDE_BYTES_PER_CORE

    @property
    def usable_bytes(self) -> int:
        """The most that a new engine may take."""
        return max(0, self.free_bytes - self.outside_bytes)

    def largest_limit(self) -> str:
        """Return `usable_bytes` as a limit that can be given, such as "10.9GiB"."""
        return f"{self.usable_bytes * 10 // GIB / 10:.1f}GiB"

    def holders(self) -> str:
        """Return who has what is not free, as far as this process can tell."""
        others = self.total_bytes - self.free_bytes - self.own_bytes
        holders = (
            f"{format_gib(others)} GiB are held by the driver and by what else runs on the GPU, such as a desktop, a "
            "browser or another model's server (nvidia-smi lists them)"
        )
        if self.own_bytes >= 0.01 * GIB:
            holders += f", {format_gib(self.own_bytes)} GiB by this process, such as an LLM that is not closed"
        return holders


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return what the GPU has and what of it is free now, once unused caches are given back; None for the host."""
    described = device_of(device)
    if described.is_host:
        return None
    gc.collect()  # of an engine that was dropped and not closed
    own = described.held_bytes()
    free, total = described.memory()
    return DeviceMemory(total, free, own, described.target.num_cores)


def advice_when_full(message: str) -> str | None:
    """Return what to do about an error with this message, if it says that the GPU's memory is full; else None."""
    if "out of memory" not in message and "ALLOC_FAILED" not in message:
        return None
    wanted, number = re.search(r"Tried to allocate ([\d.]+ \w+)", message), re.search(r"GPU (\d+)", message)
    what = f"{wanted[1]} more were wanted" if wanted else message.splitlines()[0].rstrip(".")
    said = f"the GPU's memory is full: {what}"
    others = "max_num_batched_tokens or max_num_seqs, or end what else runs on the GPU"
    device = accelerator()
    if device is None:
        return f"{said}: lower gpu_memory_limit, {others}"
    now = device_memory(torch.device(device.type, int(number[1]) if number else device.index))
    # Memory of this process will be free when it runs again.
    there = replace(now, free_bytes=now.free_bytes + now.own_bytes, own_bytes=0)
    return (
        f'{said}: set gpu_memory_limit to at most "{there.largest_limit()}", lower {others}. Without this process '
        f"{format_gib(there.free_bytes)} of {format_gib(there.total_bytes)} GiB are free; {there.holders()}"
    )
