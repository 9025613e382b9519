"""What passes over the link in a step: weights, experts that are missed, and KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from nanoinfer.config import EngineConfig
from nanoinfer.models.base import ModelSpec
from nanoinfer.step.memory_plan import MemoryPlan


def num_blocks(spec: ModelSpec, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the KV blocks of rows of so many tokens: those that are full, and all."""
    groups = spec.kv_groups
    return sum(map(groups.num_full, lengths)), sum(map(groups.num_blocks, lengths))


def num_streamed(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, lengths: Sequence[int]) -> int:
    """Return how many full blocks of rows of so many tokens stay in host memory alone."""
    num_full, num_all = num_blocks(spec, lengths)
    room, most = memory.num_gpu_blocks - 1, num_full  # one block is scratch
    if num_all > room and config.may_offload:
        most = max(0, room - len(lengths) * len(spec.kv_groups))  # each row has tails, which nothing but the GPU holds
    elif config.enable_cpu_offload is not True:
        return 0
    resident = most if memory.max_resident_blocks is None else min(most, memory.max_resident_blocks)
    return max(0, num_full - resident)


def streamed_bytes(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, lengths: Sequence[int]) -> int:
    """Return what each decode step of rows of so many tokens moves over the link."""
    return memory.streamed_bytes + num_streamed(config, spec, memory, lengths) * spec.layout.block_bytes


def missed_bytes(spec: ModelSpec, memory: MemoryPlan, num_rows: int, hit_rate: float | None = None) -> int:
    """Return what a decode step of so many rows brings of experts that lie in host memory.

    hit_rate: share of the chosen experts that are in a slot; None: as if all were chosen equally often.
    """
    if not memory.num_expert_slots:
        return 0
    hit_rate = memory.num_expert_slots / spec.sparse.num_experts if hit_rate is None else hit_rate
    return int(memory.expert_bytes * spec.sparse.chosen_share(num_rows) * (1 - hit_rate))
