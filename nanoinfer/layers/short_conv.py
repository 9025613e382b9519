"""A short convolution along the sequence, between two gates: what LFM2 has in most layers in place of attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.cuts import columns_cut, divided
from nanoinfer.layers.formats.base import Formats
from nanoinfer.layers.linear import Linear


class Taps(nn.Module):
    """The weight of a convolution by channel, [size, 1, taps], the last tap is the token's own; and its bias."""

    def __init__(self, size: int, taps: int, *, bias: bool, dtype: torch.dtype, device) -> None:
        super().__init__()
        options = dict(dtype=dtype, device=device)
        self.weight = nn.Parameter(torch.empty(size, 1, taps, **options), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, **options), requires_grad=False) if bias else None


class ShortConv(nn.Module):
    """out_proj(C * conv(B * z)), of B, C, z = in_proj(x). The last sum has two parts: half of the channels each."""

    def __init__(self, size: int, taps: int, *, bias: bool, formats: Formats, dtype: torch.dtype, device) -> None:
        super().__init__()
        options, of_out = dict(bias=bias, dtype=dtype, device=device), formats.below("out_proj")
        cut = columns_cut(size, of_out.of("").column_block)
        sizes = 3 * divided(size, cut)
        self.in_proj = Linear(size, 3 * size, row_sizes=sizes, formats=formats.below("in_proj"), **options)
        self.conv = Taps(size, taps, **options)
        self.out_proj = Linear(size, size, cut=cut, formats=of_out, **options)

    def forward(self, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], num_live: Tensor) -> Tensor:
        """Compute the input of `out_proj`, [N, size], and update the state; see `kernels.layer.short_conv`."""
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        projected = self.in_proj(normed)
        return self.in_proj.operations.short_conv(projected, weight, bias, state["inputs"], runs, num_live)
