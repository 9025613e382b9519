"""What is said where memory is too small: how much would do, and of which kind."""

from __future__ import annotations

from typing import NoReturn

from nanoinfer.common.units import enough, format_gib, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.models.base import ModelSpec

# Of the host memory that is available beside streamed weights, KV takes as much where no limit is given.
KV_SHARE = 0.6


class TooSmall(ValueError):
    """What is wanted does not fit into the memory; with other settings it may."""


def min_blocks(config: EngineConfig, plan: MemoryPlan, context: int = 1) -> int:
    """Return the smallest useful GPU pool: scratch, one prefill chunk in flight, its tail and one decoding tail.

    context: tokens for which there must be room where the settings ask for none.
    """
    chunk = -(-plan.max_num_batched_tokens // config.block_size)
    if config.may_offload:
        return chunk + 3
    least = max(context, config.block_size)
    wanted = plan.max_model_len if config.max_model_len is not None else min(plan.max_model_len, least)
    return -(-wanted // config.block_size) + 2


def least_bytes(config: EngineConfig, plan: MemoryPlan) -> int:
    """Return the smallest budget, in whole MiB, with which this plan's settings fit."""
    blocks = min_blocks(config, plan)
    needed = plan.fixed_bytes + blocks * plan.block_bytes
    needed += max(plan.max_splits, 2 * blocks + plan.max_num_seqs) * plan.split_bytes
    return -(-needed // 2**20) * 2**20


def refuse_gpu(config: EngineConfig, plan: MemoryPlan, also: str = "") -> NoReturn:
    """Raise `TooSmall` for a plan with less than the smallest useful pool. also: what else would do."""
    blocks = min_blocks(config, plan)
    if config.num_gpu_blocks_override is not None and config.num_gpu_blocks_override < blocks:
        raise ValueError(
            f"num_gpu_blocks_override={config.num_gpu_blocks_override} is too small: {blocks} KV blocks of "
            f"{config.block_size} tokens are the fewest, or lower max_num_batched_tokens={plan.max_num_batched_tokens}"
        )
    needed, streamed = least_bytes(config, plan), ""
    if plan.streamed_bytes:
        streamed = f" beside {format_size(plan.streamed_bytes)} that are streamed"
    elif plan.num_expert_slots:
        streamed = f", {format_size(plan.place_bytes)} for {plan.num_expert_slots} experts of each layer"
    given = "what is free of the device's memory, or the share of it that may be taken,"
    if config.gpu_memory_limit is not None:
        given = f"gpu_memory_limit={config.gpu_memory_limit!r}"
    lower = [name for name in ("max_num_batched_tokens", "max_num_seqs") if getattr(plan, name) > 1]
    if plan.weight_bytes + plan.place_bytes >= plan.budget_bytes:
        lower = []
    help_lower = ", or set " + " or ".join(f"{name} below {getattr(plan, name)}" for name in lower) if lower else ""
    help_offload = "" if config.may_offload else ", lower max_model_len or set enable_cpu_offload=True"
    if config.expert_slots is not None:
        help_offload = f", or lower expert_slots={config.expert_slots}"
    rest = plan.fixed_bytes - plan.weight_bytes - plan.place_bytes * bool(plan.num_expert_slots)
    raise TooSmall(
        f"{given} ({format_size(plan.budget_bytes)}) is too small: weights {format_size(plan.weight_bytes)}{streamed}, "
        f"working memory and buffers {format_size(rest)} and the least KV cache "
        f'{format_size(needed - plan.fixed_bytes)} need {format_size(needed)}: give at least "{enough(needed)}"'
        f"{help_lower}{help_offload}{also}"
    )


def host_wanted(config: EngineConfig, plan: MemoryPlan, available_bytes: int) -> str:
    """Say how much host memory the weights that this plan streams need, and KV beside them."""
    limit, blocks = config.host_memory_limit, -(-(config.max_model_len or config.block_size) // config.block_size)
    if not config.may_offload or config.enable_cpu_offload == "auto" and plan.num_gpu_blocks > blocks:
        blocks = 0
    share = KV_SHARE if limit is None else 1.0
    needed = enough(plan.host_weight_bytes + -int(-blocks * plan.block_bytes // share))
    streamed = f"{format_gib(plan.host_weight_bytes)} GiB of weights are to be streamed from host memory"
    if limit is None:
        has = f'{format_gib(available_bytes)} GiB are available: free some, "{needed}" are enough'
    else:
        has = f"host_memory_limit={limit!r} is {format_gib(limit)} GiB: "
        has += f'give at least "{needed}" of what is available, {format_gib(available_bytes)} GiB'
    return f"{streamed}, and {has}"


def checked_slots(config: EngineConfig, spec: ModelSpec) -> int:
    """Return `config.expert_slots`, 0 for None; ValueError if the model has no experts, or another number of them."""
    count, sparse = config.expert_slots, spec.sparse
    if count is None:
        return 0
    if sparse is None:
        raise ValueError(f"expert_slots={count}, and {spec.architecture} has no experts: leave it out")
    if not sparse.num_chosen <= count <= sparse.num_experts:
        raise ValueError(
            f"expert_slots={count}: a layer has {sparse.num_experts} experts, and a token takes {sparse.num_chosen} of "
            f"them: give a number from {sparse.num_chosen} to {sparse.num_experts}"
        )
    return count
