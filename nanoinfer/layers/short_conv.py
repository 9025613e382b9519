"""A short convolution along the sequence, between two gates: what LFM2 has in most layers in place of attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.cuts import columns_cut, divided
from nanoinfer.kernels.linear.shard import WHOLE, Held, Shard, held_columns, held_rows, joined_rows
from nanoinfer.layers.formats.base import Formats
from nanoinfer.layers.linear import Linear


def channels_divide(size: int, shard: Shard) -> bool:
    """Whether ranks have equal shares of so many channels. Else each has all, so that their states are alike."""
    return not shard.is_whole and len({end - begin for begin, end in (one.columns(size) for one in shard.all)}) == 1


class Taps(nn.Module):
    """The weight of a convolution by channel, [size, 1, taps], the last tap is the token's own; and its bias.

    held: which channels these are, of a rank's share.
    """

    def __init__(
        self, size: int, taps: int, *, bias: bool, held: Held | None = None, dtype: torch.dtype, device
    ) -> None:
        super().__init__()
        self._held, options = held, dict(dtype=dtype, device=device)
        self.weight = nn.Parameter(torch.empty(size, 1, taps, **options), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, **options), requires_grad=False) if bias else None

    def held_views(self) -> dict[str, Held]:
        """Return which channels a rank has of a checkpoint's tensors."""
        names = ("weight", "bias") if self.bias is not None else ("weight",)
        return {} if self._held is None else dict.fromkeys(names, self._held)


class ShortConv(nn.Module):
    """out_proj(C * conv(B * z)), of B, C, z = in_proj(x). The last sum has two parts: half of the channels each."""

    def __init__(
        self, size: int, taps: int, *, bias: bool, formats: Formats, shard: Shard = WHOLE, dtype: torch.dtype, device
    ) -> None:
        super().__init__()
        options, of_out = dict(bias=bias, dtype=dtype, device=device), formats.below("out_proj")
        cut = columns_cut(size, of_out.of("").column_block)
        own, sizes, of_in, of_taps, of_sum = size, 3 * divided(size, cut), {}, {}, {}
        if channels_divide(size, shard):
            begin, end = shard.columns(size)
            rows, own = held_rows(size, begin, end), end - begin
            sizes, of_in, of_taps = 3 * (own,), dict(held=joined_rows(3 * [rows])), dict(held=rows)
            of_sum = dict(held=held_columns(size, begin, end), bias=bias and shard.rank == 0)
        self.in_proj = Linear(size, 3 * own, row_sizes=sizes, formats=formats.below("in_proj"), **of_in, **options)
        self.conv = Taps(own, taps, **of_taps, **options)
        self.out_proj = Linear(own, size, cut=cut, formats=of_out, **options | of_sum)

    def forward(self, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], num_live: Tensor) -> Tensor:
        """Compute the input of `out_proj`, [N, size], and update the state; see `kernels.layer.short_conv`."""
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        projected = self.in_proj(normed)
        return self.in_proj.operations.short_conv(projected, weight, bias, state["inputs"], runs, num_live)
