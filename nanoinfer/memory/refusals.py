"""What is said where memory is too small: how much would do, and of which kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanoinfer.common.units import enough, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.memory.limits import KV_SHARE, TooSmall, above_available, least_bytes, min_blocks
from nanoinfer.memory.planner import Cost, Planner
from nanoinfer.step.memory_plan import MemoryPlan


def refuse(planner: Planner, costs: Iterable[Cost]) -> ValueError:
    """Return the refusal of all candidates that a search has looked at: what came closest, and what it lacks."""
    config, available = planner.config, planner.host_available_bytes
    lacking: dict[str, list[Cost]] = {}
    for cost in costs:
        lacking.setdefault(cost.lacks, []).append(cost)
    if (long := lacking.get("length")) is not None:
        return _lacks_length(
            config, planner.plan(max(long, key=lambda cost: (cost.max_model_len, -cost.streamed_bytes)))
        )
    if (without := lacking.get("host_kv")) is not None:
        return _lacks_host_kv(config, planner.plan(min(without, key=lambda cost: cost.host_weight_bytes)))
    # Candidates that the host has no room for, but the GPU has: the one with the least host memory is what to ask for.
    least = {cost.candidate.tokens: planner.least_blocks(cost.candidate.tokens) for cost in lacking.get("host", ())}
    streaming = [cost for cost in lacking.get("host", ()) if cost.num_gpu_blocks >= least[cost.candidate.tokens]]
    streaming += lacking.get("limit", [])
    also, roomy = "", min(streaming, key=lambda cost: cost.host_weight_bytes, default=None)
    if "gpu" in lacking:
        longest = planner.sized(planner.steps[-1]).max_model_len  # as asked, not cut to what fits
        plans = [planner.plan(cost._replace(max_model_len=longest)) for cost in lacking["gpu"]]
        smallest = min(plans, key=lambda plan: (least_bytes(config, plan), len(plan.streamed_pieces), plan.head_bytes))
        if roomy is not None:
            also = f", or stream more: {host_wanted(config, planner.plan(roomy), available)}"
        return _lacks_gpu(config, smallest, also)
    if "limit" in lacking:
        return ValueError(above_available(config, available))
    closest = roomy or min(lacking["host"], key=lambda cost: cost.host_weight_bytes)
    plan, room = planner.plan(closest), max(0, planner.host_room(closest.fixed_bytes))
    if plan.host_weight_bytes > room:
        return TooSmall(host_wanted(replace(config, host_memory_limit=None), plan, room))
    return TooSmall(host_wanted(config, plan, available))


def _lacks_length(config: EngineConfig, plan: MemoryPlan) -> TooSmall:
    longest = plan.max_model_len
    wanted, fit = (plan.groups.most_blocks(tokens) * plan.block_bytes for tokens in (config.max_model_len, longest))
    return TooSmall(
        f"max_model_len={config.max_model_len} needs a KV cache of {format_size(wanted)}, and "
        f"{format_size(fit)} fit: lower max_model_len to at most {longest} "
        f"or raise {'host_memory_limit' if config.may_offload else 'gpu_memory_limit'}"
    )


def _lacks_host_kv(config: EngineConfig, plan: MemoryPlan) -> TooSmall:
    tokens, limit, streamed = (
        config.max_model_len or plan.groups.block_size,
        config.host_memory_limit,
        plan.host_weight_bytes,
    )
    num_bytes = plan.groups.most_blocks(tokens) * plan.block_bytes
    beside = f" beside {format_size(streamed)} of weights" if streamed else ""
    return TooSmall(
        f"host_memory_limit={limit!r} is too small{beside}: the KV cache of {tokens} tokens takes "
        f'{format_size(num_bytes)}: give at least "{enough(num_bytes + streamed)}"'
    )


def _lacks_gpu(config: EngineConfig, plan: MemoryPlan, also: str = "") -> ValueError:
    """Return the refusal of a plan with less than the smallest useful pool. also: what else would do."""
    blocks = min_blocks(config, plan)
    if config.num_gpu_blocks_override is not None and config.num_gpu_blocks_override < blocks:
        return ValueError(
            f"num_gpu_blocks_override={config.num_gpu_blocks_override} is too small: {blocks} KV blocks of "
            f"{plan.groups.block_size} tokens are the fewest, or lower "
            f"max_num_batched_tokens={plan.max_num_batched_tokens}"
        )
    needed, streamed = least_bytes(config, plan), ""
    if plan.streamed_bytes:
        streamed = f" beside {format_size(plan.streamed_bytes)} that are streamed"
    elif plan.num_expert_slots:
        streamed = f", {format_size(plan.landing_bytes)} for {plan.num_expert_slots} experts of each layer"
    limit = "what is free of the device's memory, or the share of it that may be taken,"
    if config.gpu_memory_limit is not None:
        limit = f"gpu_memory_limit={config.gpu_memory_limit!r}"
    lower = [name for name in ("max_num_batched_tokens", "max_num_seqs") if getattr(plan, name) > 1]
    if plan.weight_bytes + plan.landing_bytes >= plan.budget_bytes:
        lower = []
    help_lower = ", or set " + " or ".join(f"{name} below {getattr(plan, name)}" for name in lower) if lower else ""
    help_offload = "" if config.may_offload else ", lower max_model_len or set enable_cpu_offload=True"
    if config.expert_slots is not None:
        help_offload = f", or lower expert_slots={config.expert_slots}"
    rest = plan.fixed_bytes - plan.weight_bytes - plan.landing_bytes * bool(plan.num_expert_slots)
    return TooSmall(
        f"{limit} ({format_size(plan.budget_bytes)}) is too small by {format_size(needed - plan.budget_bytes)}: "
        f'give at least "{enough(needed)}"{help_lower}{help_offload}{also}. Needed: weights '
        f"{format_size(plan.weight_bytes)}{streamed}, working memory and buffers {format_size(rest)} and the least KV "
        f"cache {format_size(needed - plan.fixed_bytes)}"
    )


def host_wanted(config: EngineConfig, plan: MemoryPlan, available_bytes: int) -> str:
    """Say how much host memory the weights that this plan streams need, and KV beside them."""
    limit, blocks = config.host_memory_limit, plan.groups.most_blocks(config.max_model_len or plan.groups.block_size)
    if not config.may_offload or config.enable_cpu_offload == "auto" and plan.num_gpu_blocks > blocks:
        blocks = 0
    share = KV_SHARE if limit is None else 1.0
    needed = enough(plan.host_weight_bytes + -int(-blocks * plan.block_bytes // share))
    streamed = f"for the {format_size(plan.host_weight_bytes)} of weights that are streamed from there"
    if limit is None:
        available = f"{format_size(available_bytes)} of host memory are available, too few"
        return f'{available} {streamed}: free some, "{needed}" are enough'
    has = f'host_memory_limit={limit!r} is too small {streamed}: give at least "{needed}"'
    if available_bytes > limit:  # a plan for another machine knows the limit alone
        has += f" of what is available, {format_size(available_bytes)}"
    return has
