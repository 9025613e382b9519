"""The bytes that an engine may take on its device."""

from __future__ import annotations

import psutil

from nanoinfer.common.units import format_gib
from nanoinfer.config import EngineConfig
from nanoinfer.memory.machine import DeviceMemory


def gpu_budget(config: EngineConfig, memory: DeviceMemory | None, host_available_bytes: int) -> int:
    """Return the bytes that the engine may take on its device.

    memory: of the GPU, now; None: the device is the CPU.

    Raises:
        ValueError: the limit is more than is free on the GPU. Loading would end in an error without advice.
    """
    limit = config.gpu_memory_limit
    if limit is None:
        if memory is None:
            return int(host_available_bytes * 0.4)
        return min(int(memory.total_bytes * config.gpu_memory_utilization), memory.usable_bytes)
    total = psutil.virtual_memory().total if memory is None else memory.total_bytes
    limit = int(limit * total if isinstance(limit, float) else limit)  # a float is a share
    if memory is not None and limit > memory.usable_bytes:
        setting = f"gpu_memory_limit={config.gpu_memory_limit!r} ({format_gib(limit)} GiB)"
        has = f"Of its {format_gib(total)} GiB {format_gib(memory.free_bytes)} are free now"
        raise ValueError(
            f'{setting} is more than the GPU has free: give at most "{memory.largest_limit()}", leave it out to take '
            f"what is free, or end what else runs there. {has}, and {format_gib(memory.outside_bytes)} of these go to "
            f"libraries; {memory.holders()}"
        )
    return limit
