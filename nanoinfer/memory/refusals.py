"""What is said where memory is too small: what is short, and how much would do."""

from __future__ import annotations

from collections.abc import Iterable

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

    def least_of_host(*names: str) -> Cost | None:
        """Return the one with the least host memory of those for which the GPU has room."""
        costs = (cost for name in names for cost in lacking.get(name, ()))
        costs = (cost for cost in costs if cost.num_gpu_blocks >= planner.least_blocks(cost.candidate.tokens))
        return min(costs, key=lambda cost: cost.host_weight_bytes, default=None)

    if (without := least_of_host("host_kv")) is not None:
        return _lacks_host_kv(config, planner.plan(without))
    roomy = least_of_host("host", "limit")
    if short := [*lacking.get("gpu", ()), *lacking.get("host_kv", ())]:
        longest = planner.sized(planner.steps[-1]).max_model_len  # as asked, not cut to what fits
        plans = [planner.plan(cost._replace(max_model_len=longest)) for cost in short]
        smallest = min(plans, key=lambda plan: (least_bytes(config, plan), len(plan.streamed_pieces), plan.head_bytes))
        beside = () if "gpu" in lacking else _lacks_host_kv(config, smallest).helps
        refusal = _lacks_gpu(config, smallest, beside)
        if roomy is None or not isinstance(refusal, TooSmall):
            return refusal
        host = _lacks_host(planner, roomy)  # the cheaper memory
        return TooSmall(host.problem, *host.helps, *refusal.helps)
    if "limit" in lacking:
        return ValueError(above_available(config, available))
    return _lacks_host(planner, roomy or min(lacking["host"], key=lambda cost: cost.host_weight_bytes))


def _lacks_length(config: EngineConfig, plan: MemoryPlan) -> TooSmall:
    longest = plan.max_model_len
    wanted, fit = (plan.groups.most_blocks(tokens) * plan.block_bytes for tokens in (config.max_model_len, longest))
    return TooSmall(
        f"max_model_len={config.max_model_len} needs a KV cache of {format_size(wanted)}, and "
        f"{format_size(fit)} fit, enough for {longest} tokens",
        f"raise {'host_memory_limit' if config.may_offload else 'gpu_memory_limit'}",
    )


def _lacks_host_kv(config: EngineConfig, plan: MemoryPlan) -> TooSmall:
    tokens, limit, streamed = (
        config.max_model_len or plan.groups.block_size,
        config.host_memory_limit,
        plan.host_weight_bytes,
    )
    num_bytes = plan.groups.most_blocks(tokens) * plan.block_bytes
    beside = f" beside {format_size(streamed)} of weights" if streamed else ""
    host = "the host memory that is available" if limit is None else f"host_memory_limit={limit!r}"
    return TooSmall(
        f"{host} is too small{beside} for the KV cache of {tokens} tokens, {format_size(num_bytes)}",
        f'give at least "{enough(num_bytes + streamed)}" of host memory',
    )


def _lacks_gpu(config: EngineConfig, plan: MemoryPlan, beside: Iterable[str]) -> ValueError:
    """Return the refusal of a plan with less than the smallest useful pool. beside: what else it takes."""
    blocks = min_blocks(config, plan)
    if config.num_gpu_blocks_override is not None and config.num_gpu_blocks_override < blocks:
        return ValueError(
            f"num_gpu_blocks_override={config.num_gpu_blocks_override} is too small: {blocks} KV blocks of "
            f"{plan.groups.block_size} tokens are the fewest, or lower "
            f"max_num_batched_tokens={plan.max_num_batched_tokens}"
        )
    needed, streamed = least_bytes(config, plan), ""
    if plan.streamed_bytes:
        streamed = f" ({format_size(plan.streamed_bytes)} more are streamed)"
    elif plan.num_expert_slots:
        streamed = f", {format_size(plan.landing_bytes)} for {plan.num_expert_slots} experts of each layer"
    limit, size, missing = config.gpu_memory_limit, plan.budget_bytes, format_size(needed - plan.budget_bytes)
    short = f"the {format_size(size)} of the device's memory that may be taken are too few by {missing}"
    if limit is not None:
        share = f" ({format_size(size)})" if isinstance(limit, float) else ""
        short = f"gpu_memory_limit={limit!r}{share} is too small by {missing}"
    rest = plan.fixed_bytes - plan.weight_bytes - plan.landing_bytes * bool(plan.num_expert_slots)
    return TooSmall(
        short,
        " and ".join([f'give at least "{enough(needed)}" of GPU memory', *beside]),
        takes=f"Weights take {format_size(plan.weight_bytes)}{streamed}, working memory and buffers "
        f"{format_size(rest)}, the least KV cache {format_size(needed - plan.fixed_bytes)}",
    )


def _lacks_host(planner: Planner, cost: Cost) -> TooSmall:
    """Return the refusal of a plan that streams more weights than the host has room for, and KV beside them."""
    config, available, plan = planner.config, planner.host_available_bytes, planner.plan(cost)
    limit, blocks = config.host_memory_limit, plan.groups.most_blocks(config.max_model_len or plan.groups.block_size)
    room = max(0, planner.host_room(cost.fixed_bytes))
    if plan.host_weight_bytes > room and limit != available:  # of another machine the limit alone is known
        limit, available = None, room
    if not config.may_offload or config.enable_cpu_offload == "auto" and plan.num_gpu_blocks > blocks:
        blocks = 0
    share = KV_SHARE if limit is None else 1.0
    needed = enough(plan.host_weight_bytes + -int(-blocks * plan.block_bytes // share))
    streamed = f"for the {format_size(plan.host_weight_bytes)} of weights that are streamed from there"
    if limit is None:
        return TooSmall(
            f"{format_size(available)} of host memory are available, too few {streamed}",
            f'free some of the host\'s memory, "{needed}" are enough',
        )
    of_all = f", of which {format_size(available)} are available" if available > limit else ""
    return TooSmall(
        f"host_memory_limit={limit!r} is too small {streamed}", f'give at least "{needed}" of host memory{of_all}'
    )
