"""The choice of experts and what they compute, in plain torch: on the CPU, and what tests compare the kernels with."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.kernels.activations import ACTIVATIONS
from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, ExpertWeights, GatedActivation, Routing
from nanoinfer.kernels.experts.slot_tables import SlotTables
from nanoinfer.kernels.linear.cuts import divided


def choose_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None,
    num_live: Tensor,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row, as `choose.choose_experts` says."""
    value = logits[:, : routing.num_experts].float().contiguous()
    score = key = value
    if routing.scores == SOFTMAX:
        score = value.softmax(-1)
    elif routing.scores == SIGMOID:
        score = exact.elementwise(torch.sigmoid, value)
        if routing.rounds_scores:
            score = score.to(dtype).float()
        key = score if bias is None else score + bias
    key = torch.where(key.isnan(), float("-inf"), key)
    if routing.num_groups > 1:
        groups = key.unflatten(-1, (routing.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).sort(descending=True, stable=True).indices
        is_open = torch.zeros_like(groups, dtype=torch.bool)
        is_open.scatter_(1, best[:, : routing.num_chosen_groups, None].expand(-1, -1, groups.shape[-1]), True)
        key = key.masked_fill(~is_open.flatten(1), float("-inf"))
        ids = _sorted_within(key, is_open.flatten(1))
    else:
        ids = key.sort(descending=True, stable=True).indices
    ids = ids[:, : routing.num_chosen]
    weights = score.gather(1, ids)
    if routing.scores not in (SOFTMAX, SIGMOID):
        weights = exact.elementwise(torch.exp, weights - weights[:, :1])
    if routing.is_normed:
        total = torch.zeros_like(weights[:, 0])
        for column in weights.unbind(1):  # in the order of the choice
            total = total + column
        if routing.rounds_scores:
            total = total.to(dtype).float()
        total = total + (routing.least if routing.scores == SIGMOID else 0.0)
        if routing.rounds_scores:
            total = total.to(dtype).float()
        weights = weights / total.unsqueeze(1)
    if routing.is_rounded or routing.rounds_scores:
        weights = weights.to(dtype).float()
    weights = weights * routing.factor
    if routing.rounds_scores:
        weights = weights.to(dtype).float()
    if factors is not None:
        weights = weights * factors.float()[ids]
    is_live = torch.arange(len(logits), device=logits.device)[:, None] < num_live
    if routing.here is not None:
        first, end = routing.here
        ids = torch.where((ids >= first) & (ids < end), ids - first, -1)
    return ids.int().where(is_live, -1), weights.where(is_live, 0.0)


def _sorted_within(key: Tensor, is_open: Tensor) -> Tensor:
    """Return columns by descending key, the open ones first, also where their key is the least."""
    order = key.sort(descending=True, stable=True).indices
    return order.gather(1, is_open.gather(1, order).byte().sort(descending=True, stable=True).indices)


def place_experts(ids: Tensor, slots: SlotTables) -> Tensor:
    """Bring the experts that rows choose to the pool, as `slots.place_experts` says."""
    chosen = ids[ids >= 0].unique().long()  # ascending
    slots.clock += 1
    held = slots.held[chosen]
    slots.used[(held[held >= 0] - slots.first_slot).long()] = slots.clock
    oldest = slots.used.sort(stable=True).indices
    free = oldest[slots.used[oldest] < slots.clock]
    missing = chosen[held < 0]
    own = free[: len(missing)]
    placed, spare = missing[: len(own)], missing[len(own) :]
    before = slots.owner[own]
    slots.held[before[before >= 0].long()] = -1
    slots.owner[own], slots.used[own] = placed.int(), slots.clock
    slots.held[placed] = (own + slots.first_slot).int()
    slots.table.fill_(-1)
    slots.table[chosen] = slots.held[chosen]
    slots.table[spare] = torch.arange(len(spare), dtype=torch.int32, device=ids.device) + slots.first_spare
    slots.pool[slots.table[missing].long()] = slots.home[missing].to(slots.pool.device)
    counts = len(chosen) - len(missing), len(placed), len(spare), int((before >= 0).sum())
    slots.counts += torch.tensor(counts, device=ids.device)
    return slots.table


def gated(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    """Compute activation(gate) * up of rounded values: [N, size] each."""
    if activation.limit is None:
        return exact.elementwise(ACTIVATIONS[activation.name], gate) * up
    limit, wide = activation.limit, gate.float().clamp(max=activation.limit)
    sigmoid = exact.elementwise(torch.sigmoid, wide * activation.alpha)
    return ((up.float().clamp(-limit, limit) + 1.0) * (wide * sigmoid)).to(gate.dtype)


def expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    table: Tensor,
    experts: ExpertWeights,
    activation: GatedActivation,
    first_half: int,
    shared: Tensor | None = None,
    experts_read: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Run each row through its experts, one expert at a time, and add what they give: [2, N, hidden_size] float32.

    Operands of 16 bits are widened to float32. experts_read: [1] int64, to which the number of these experts is added.
    """
    products = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    is_here = (ids >= 0) & (table[ids.clamp(min=0).long()] >= 0)
    numbers = ids[is_here].unique().tolist()
    if experts_read is not None:
        experts_read += len(numbers)
    for number in numbers:
        rows, turns = (is_here & (ids == number)).nonzero(as_tuple=True)
        gate_up, bias, down, down_bias = experts.matrices(int(table[number]))
        products[rows, turns] = _product(_hidden(x[rows], gate_up, bias, activation), down, down_bias)
    sums = torch.zeros(2, *x.shape, dtype=torch.float32, device=x.device)
    products *= weights.unsqueeze(2)
    for column, of_expert, counts in zip(products.unbind(1), ids.unbind(1), is_here.unbind(1), strict=True):
        for half, is_own in enumerate((of_expert < first_half, of_expert >= first_half)):
            sums[half] = torch.where((is_own & counts)[:, None], sums[half] + column, sums[half])
    if shared is None:
        return sums
    return sums + (shared if shared_gate is None else shared * exact.elementwise(torch.sigmoid, shared_gate).float())


def shared_mlp(
    x: Tensor, table: Tensor, experts: ExpertWeights, activation: GatedActivation, cut: int | None
) -> Tensor:
    """Run all rows through one expert, with its last sum in two parts, cut there: [2, N, hidden_size] float32.

    cut: None: it is one part, the first, and the other is 0.

    Gate and up are cut at the same place, into products of their own; see `exact.linear`.
    """
    gate_up, bias, down, _ = experts.matrices(int(table[0]))
    if cut is None:
        part = exact.wide_linear(_hidden(x, gate_up, bias, activation, 2 * (down.shape[1],)), down)
        return torch.stack((part, torch.zeros_like(part)))
    hidden = _hidden(x, gate_up, bias, activation, 2 * divided(down.shape[1], cut))
    parts = (exact.wide_linear(hidden[:, some], down[:, some]) for some in (slice(cut), slice(cut, None)))
    return torch.stack(tuple(parts))


def _hidden(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, activation: GatedActivation, row_sizes: tuple[int, ...] = ()
) -> Tensor:
    return gated(*_product(x, gate_up, bias, row_sizes).to(x.dtype).chunk(2, dim=1), activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, row_sizes: tuple[int, ...] = ()) -> Tensor:
    product = exact.linear(x.float(), weight.float(), row_sizes=row_sizes)
    return product if bias is None else product + bias.float()
