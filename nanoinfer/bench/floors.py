"""What this machine can do, measured in the same run: no step can be faster than its bytes over these."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from nanoinfer.models import ModelSpec

COPY_BYTES = 2**30
CPU_COPY_BYTES = 2**27


@dataclass(frozen=True)
class Floors:
    """Bandwidths in bytes per second.

    Attributes:
        link: one large copy from pinned host memory to the GPU. On the CPU: a copy in main memory.
        device: one large copy on the device, bytes read and written counted. On the CPU: the same copy as `link`.
    """

    link: float
    device: float

    def offload_step(self, streamed_bytes: float, read_bytes: float) -> float:
        """Seconds below which a step that streams and reads this much cannot come."""
        return max(streamed_bytes / self.link, read_bytes / self.device)


def measure_floors(device: torch.device, repeats: int = 7) -> Floors:
    """Medians over `repeats` copies of 1 GiB (128 MiB on the CPU)."""
    if device.type != "cuda":
        source = torch.ones(CPU_COPY_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        seconds = _median(lambda: target.copy_(source), None, repeats)
        return Floors(link=CPU_COPY_BYTES / seconds, device=2 * CPU_COPY_BYTES / seconds)
    on_host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    link = _median(lambda: target.copy_(on_host, non_blocking=True), device, repeats)
    copy = _median(lambda: target.copy_(source), device, repeats)
    del on_host, source, target
    torch.cuda.empty_cache()
    return Floors(link=COPY_BYTES / link, device=2 * COPY_BYTES / copy)


def _median(work, device: torch.device | None, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        if device is not None:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device is not None:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def bytes_read_per_step(spec: ModelSpec, lengths: list[int]) -> float:
    """Device bytes that a decode step must read: every weight but unused embeddings, and the KV of every row."""
    embedding = spec.vocab_size * spec.hidden_size * spec.dtype.itemsize
    weights = spec.weight_bytes - (0 if spec.tied_embeddings else embedding)
    per_token = 0
    for window in spec.windows:
        tokens = sum(length if window is None else min(length, window) for length in lengths)
        per_token += tokens * 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    return weights + per_token
