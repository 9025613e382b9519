"""Pools of experts' runs, and the tables that say where each expert lies."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from nanoinfer.layers.experts import Experts

_TABLE_STEP = 4
"""Tables begin at a multiple of so many entries, 16 bytes: another alignment would be another binary of a kernel."""


def share_pools(
    model: nn.Module, *, device, own_pool: Callable[[Experts], Tensor | None] = lambda one: None
) -> nn.ParameterList:
    """Give the experts of all layers whose runs are of one length one pool, each layer its table, and all one count.

    own_pool: returns memory, [num_experts, stride] uint8, for the experts of a layer whose runs lie apart from others.
    """
    owners = [module for module in model.modules() if isinstance(module, Experts)]
    memory = {one: own_pool(one) for one in owners}
    by_pool: dict[Hashable, list[Experts]] = {}
    for one in owners:
        by_pool.setdefault(one.stride if memory[one] is None else one, []).append(one)
    pools = nn.ParameterList()
    for sharing in by_pool.values():
        pool = memory[sharing[0]]
        if pool is None:
            num_runs = sum(one.num_experts for one in sharing)
            pool = torch.zeros(num_runs, sharing[0].stride, dtype=torch.uint8, device=device)
            pools.append(nn.Parameter(pool, requires_grad=False))
        sizes = [-(-one.num_experts // _TABLE_STEP) * _TABLE_STEP for one in sharing]
        table = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        pools.append(nn.Parameter(table, requires_grad=False))
        begin = 0
        for one, indices in zip(sharing, table.split(sizes), strict=True):
            indices = indices[: one.num_experts]
            indices.copy_(torch.arange(begin, begin + one.num_experts))
            one.share(pool, indices, begin)
            begin += one.num_experts
    if owners:
        pools.append(nn.Parameter(torch.zeros(1, dtype=torch.int64, device=device), requires_grad=False))
        for one in owners:
            one.experts_read = pools[-1].data
    return pools


def experts_read_of(model: nn.Module) -> Tensor | None:
    """Return the count that the experts of a model share; None: it has none."""
    return next((one.experts_read for one in model.modules() if isinstance(one, Experts)), None)
