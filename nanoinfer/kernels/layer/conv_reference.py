"""Causal convolutions of a few taps along each sequence, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.kernels.layer.state_runs import StateRuns


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor
) -> Tensor:
    """Compute C * conv(B * z) of each token, and leave in the state the last inputs of the convolution."""
    first, gate, last = projected.chunk(3, dim=-1)
    return gate * _convolved(first * last, weight, bias, state, runs, num_live)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor
) -> Tensor:
    """Compute silu(conv(x)) of each token, and leave in the state the last inputs of the convolution."""
    return exact.elementwise(F.silu, _convolved(x, weight, bias, state, runs, num_live))


def _convolved(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor
) -> Tensor:
    """Return the float32 sums of each token's inputs, the bias first, then in ascending order, rounded once."""
    num_before = weight.shape[1] - 1
    slots, begins, ends = (one.long() for one in runs[:3])
    index = torch.arange(len(inputs), device=inputs.device)
    firsts = slots[begins.clamp(0, len(inputs) - 1)]

    def at(place: Tensor) -> Tensor:  # the input at a token of each one's run, or before that, where the state has it
        before = state[firsts, (num_before + place - begins).clamp(0, num_before - 1)]
        return torch.where((place >= begins)[:, None], inputs[place.clamp(0, len(inputs) - 1)], before)

    # Products of two bytes each are exact in float32; those of float32 are exact in float64, where the sum is rounded
    # once more than in a fused operation, to more bits.
    wide = torch.float64 if inputs.dtype == torch.float32 else torch.float32
    total = inputs.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    for tap, factor in enumerate(weight.to(wide).unbind(1)):
        total = (at(index - num_before + tap).to(wide) * factor + total.to(wide)).float()
    # A run's own slot gets what its last token leaves, or, if that names another one, its first token. Others name
    # slots that no other token does. Who is not to write writes to the last slot, which is padding's.
    returns = slots[(ends - 1).clamp(0, len(inputs) - 1)] == firsts
    is_last = ((slots != firsts) | (index == torch.where(returns, ends - 1, begins))) & (index < num_live)
    kept = torch.stack([at(index + 1 - num_before + place) for place in range(num_before)], dim=1)
    state.index_copy_(0, slots.where(is_last, len(state) - 1), kept)
    return total.to(inputs.dtype)
