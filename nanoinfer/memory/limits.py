"""What is the least that works, and what can be asked for."""

from __future__ import annotations

from nanoinfer.common.units import GIB
from nanoinfer.config import EngineConfig
from nanoinfer.models.base import ModelSpec
from nanoinfer.step.memory_plan import MemoryPlan

# The share of available host memory, less streamed weights, that KV takes where no limit is given.
KV_SHARE = 0.6


class TooSmall(ValueError):
    """What is wanted does not fit into the memory; with other settings, or more of it, it may.

    Attributes:
        problem: what is short, and what takes the memory.
        helps: how much memory would do, cheapest first.
    """

    def __init__(self, short: str, *helps: str, takes: str = "") -> None:
        behind = f". {takes}" if takes else ""
        super().__init__(f"{short}: {', or '.join(helps)}{behind}")
        self.problem, self.helps = f"{short}{behind}", helps


def min_blocks(config: EngineConfig, plan: MemoryPlan) -> int:
    """Return the smallest useful GPU pool: scratch, one prefill chunk in flight, its tails and those of a row."""
    groups = plan.groups
    if config.may_offload:
        return groups.chunk_blocks(plan.max_num_batched_tokens) + 2 * len(groups) + 1
    wanted = plan.max_model_len if config.max_model_len is not None else min(plan.max_model_len, groups.block_size)
    return groups.most_blocks(wanted) + len(groups) + 1


def least_bytes(config: EngineConfig, plan: MemoryPlan) -> int:
    """Return the smallest budget, in whole MiB, with which this plan's settings fit."""
    blocks = min_blocks(config, plan)
    needed = plan.fixed_bytes + blocks * plan.block_bytes
    needed += max(plan.max_splits, 2 * blocks + plan.max_num_seqs) * plan.split_bytes
    return -(-needed // 2**20) * 2**20


def checked_slots(config: EngineConfig, spec: ModelSpec) -> int:
    """Return `config.expert_slots`, 0 for None; ValueError if the model has no experts, or another number of them."""
    count, sparse = config.expert_slots, spec.sparse
    if count is None:
        return 0
    if sparse is None:
        raise ValueError(f"expert_slots={count}, and {spec.architecture} has no experts: leave it out")
    if not sparse.most_chosen <= count <= sparse.num_experts:
        where, takes = ("", "takes") if spec.shard.is_whole else (" on each GPU", "takes up to")
        raise ValueError(
            f"expert_slots={count}: a layer has {sparse.num_experts} experts{where}, and a token {takes} "
            f"{sparse.most_chosen} of them: give a number from {sparse.most_chosen} to {sparse.num_experts}"
        )
    return count


def above_available(config: EngineConfig, available_bytes: int) -> str:
    limit = config.host_memory_limit
    return (
        f"host_memory_limit={limit!r} is more than is available, {available_bytes / GIB:.2f} GiB: lower it to that, "
        "leave it out, or free some memory"
    )
