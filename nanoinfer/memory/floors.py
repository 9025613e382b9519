"""Bandwidths of this machine, measured in the same run: no step can be faster than its bytes over them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanoinfer.devices.registry import device_of
from nanoinfer.models.base import ModelSpec

COPY_BYTES = 2**30
CPU_COPY_BYTES = 2**27
# In smaller copies the time of the launch counts.
MIN_COPY_BYTES = 64 * 2**20
# What a layer of experts takes beside its bytes: its kernels, twice as many as a dense one's, wait for each other. An
# H200's record has 35 us (docs/sparse.md, a step of qwen3-30b-a3b int4 with one row, without what its floor is).
_SPARSE_LAYER_SECONDS = 35e-6


@dataclass(frozen=True)
class Floors:
    """Bandwidths in bytes per second.

    Attributes:
        link: one large copy from pinned host memory to the GPU. On the CPU: a copy in main memory.
        device: one large copy on the device, bytes read and written counted.
        own_link: the machine's link, where `link` is an emulated one; None: it is not.
    """

    link: float
    device: float
    own_link: float | None = None

    def emulating(self, bytes_per_second: float | None) -> Floors:
        """Return the floors beside an emulated link (see `offload/runtime/throttle.py`); None: there is none."""
        if bytes_per_second is None:
            return self
        return replace(self, link=min(bytes_per_second, self.link), own_link=self.link)

    def offload_step(self, streamed_bytes: float, read_bytes: float, awaited_bytes: float = 0) -> float:
        """Return the least seconds that a step which streams and reads so many bytes can take.

        awaited_bytes: of experts that come over the link one by one, beside which nothing else can run.
        """
        return max(streamed_bytes / self.link, read_bytes / self.device) + awaited_bytes / self.link


def measure_floors(device: torch.device, repeats: int = 7, most_bytes: int = COPY_BYTES) -> Floors:
    """Return medians over `repeats` copies of `most_bytes` (128 MiB on the CPU; less if the GPU has little left)."""
    num_bytes = min(most_bytes, CPU_COPY_BYTES if device_of(device).is_host else copy_bytes(device))
    floors = _floors(device, num_bytes, repeats)
    device_of(device).give_back()
    return floors


def _floors(device: torch.device, num_bytes: int, repeats: int) -> Floors:
    on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device_of(device).pinner is not None)
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    link = _median(lambda: target.copy_(on_host, non_blocking=True), device, repeats)
    copy = _median(lambda: target.copy_(source), device, repeats)
    return Floors(link=num_bytes / link, device=2 * num_bytes / copy)


def copy_bytes(device: torch.device) -> int:
    """Return the size of a copy. Two buffers take at most half of the free GPU memory, but 64 MiB each at least.

    Floors are measured beside an engine that fills its budget.
    """
    described = device_of(device)
    described.give_back()
    free_bytes, _ = described.memory()
    return max(MIN_COPY_BYTES, min(COPY_BYTES, free_bytes // 4 // 2**20 * 2**20))


def _median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of one call, its work on the device included."""
    times = []
    synchronize = device_of(device).synchronize
    for _ in range(repeats + 1):  # the first one warms up
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def kv_bytes(spec: ModelSpec, lengths: list[int]) -> int:
    """KV bytes that rows of `lengths` tokens read in one decode step over all layers; a window bounds its layer."""
    return sum(map(spec.kv_bytes, lengths))


def bytes_read_per_step(spec: ModelSpec, lengths: list[int], num_lines: int | None = None) -> int:
    """Device bytes that a decode step must read: weights, and what is kept of every row.

    Of the weights not the unused embeddings, and of experts those that the rows choose: so many as are expected where
    each row chooses any of them, independently of the others.

    num_lines: rows and drafted tokens together; None: there are no drafts.
    """
    unread = spec.unread_bytes
    if spec.sparse is not None:
        unread += int(spec.sparse.expert_bytes * (1 - spec.sparse.chosen_share(num_lines or len(lengths))))
    return spec.weight_bytes - unread + kv_bytes(spec, lengths) + len(lengths) * spec.state_bytes


def sparse_layers_seconds(spec: ModelSpec) -> float:
    """Return what a step takes beside its bytes, of which a sparse model's has too few to hide it."""
    return 0.0 if spec.sparse is None else spec.sparse.num_layers * _SPARSE_LAYER_SECONDS
