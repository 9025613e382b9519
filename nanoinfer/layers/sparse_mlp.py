"""An MLP of experts: a router chooses some for each row, and a shared one may stand beside them (`experts`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.experts import Experts, Sparse
from nanoinfer.layers.formats.base import Formats
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import Exchange, OwnPart, RMSNorm, add_and_norm


class SparseMLP(nn.Module):
    """The sum of a row's experts, weighted by a router, and of a shared expert, if there is one.

    `gate` is the router, [num_experts, hidden_size], and behind it, where the shared expert has a gate, the one row of
    that, `shared_gate`: wide in every format, and one product. `factors`, [num_experts], are those of the experts'
    weights.
    """

    wide_projections = ("gate", "shared_gate")
    """What is never quantised while it is read."""

    neutral_factors = 1.0
    """The factor that leaves a weight as it is."""
    exchange: Exchange | None = None
    """As of `Linear`."""

    def __init__(
        self,
        hidden_size: int,
        sparse: Sparse,
        activation: GatedActivation,
        *,
        formats: Formats,
        shard: Shard = WHOLE,
        dtype: torch.dtype,
        device,
    ) -> None:
        super().__init__()
        self.is_part = not shard.is_whole
        routing, options = sparse.routing, dict(dtype=dtype, device=device)
        self.routing, self.has_wide_logits = routing, sparse.has_wide_logits
        rows = {"gate": routing.num_experts}
        if sparse.shared_gate and sparse.shared_size:
            assert not sparse.router_bias and not sparse.has_wide_logits, "the gate is computed as the router is"
            rows["shared_gate"] = 1
        row_sizes = tuple(rows.values()) if len(rows) > 1 else ()
        self.gate = Linear(hidden_size, rows, bias=sparse.router_bias, row_sizes=row_sizes, **options)
        self.choice_bias = None
        if sparse.choice_bias:
            bias = torch.empty(routing.num_experts, dtype=torch.float32, device=device)
            self.choice_bias = nn.Parameter(bias, requires_grad=False)
        self.factors = None
        if sparse.has_factors:
            self.factors = nn.Parameter(torch.empty(routing.num_experts, **options), requires_grad=False)
        of_experts = options | dict(formats=formats, shard=shard)
        self.experts = Experts(hidden_size, sparse, activation, **of_experts)
        if self.is_part:
            first = self.experts.first_expert
            self.routing = replace(routing, here=(first, first + self.experts.num_experts))
        self.shared_experts = None
        if sparse.shared_size:
            self.shared_experts = Experts(hidden_size, sparse, activation, is_shared=True, **of_experts)

    def add(
        self, x: Tensor, normed: Tensor, norm: RMSNorm | None, num_live: Tensor, behind: RMSNorm | None = None
    ) -> Tensor:
        """Add the MLP of normed, [N, hidden_size], to x, in place, and return the norm of x, as `add_and_norm`.

        num_live: [1] int32, how many rows are tokens: the others choose no expert.
        """
        return add_and_norm(x, self.sums(normed, self.logits(normed), num_live), norm, behind)

    def logits(self, x: Tensor) -> Tensor:
        """Compute what experts are chosen by, and the shared one's gate, if it has one: [N, hidden_size] -> [N,
        num_experts] or one column more."""
        return self.experts.operations.wide_linear(x, self.gate.weight) if self.has_wide_logits else self.gate(x)

    def sums(self, normed: Tensor, logits: Tensor, num_live: Tensor) -> Tensor | OwnPart:
        """Compute the two sums of each row, [2, N, hidden_size] float32; of a rank its own one. logits: as of
        `logits`."""
        choose = self.experts.operations.choose_experts
        ids, weights = choose(logits, self.routing, self.choice_bias, num_live, normed.dtype, self.factors)
        shared = None if self.shared_experts is None else self.shared_experts.as_shared(normed)
        gate = logits[:, self.routing.num_experts :] if "shared_gate" in self.gate.merged else None
        if not self.is_part:
            return self.experts(normed, ids, weights, self.routing.first_half, shared, gate)
        own = self.experts(normed, ids, weights, self.experts.num_experts, shared, gate)[0]
        return OwnPart(own, self.exchange)
