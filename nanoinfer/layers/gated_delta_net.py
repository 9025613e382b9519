"""Gated DeltaNet (Yang et al., arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it in most layers: a state for each
head of values, which decays, and of which each token replaces what lies at its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.common import exact
from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.cuts import columns_cut, divided, heads_cut
from nanoinfer.kernels.linear.shard import WHOLE, Held, Shard, held_columns, held_rows, joined_rows
from nanoinfer.layers.formats.base import FLOATS, Filling, Formats
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.short_conv import Taps


@dataclass(frozen=True)
class Delta:
    """What a family says of its layers.

    Attributes:
        heads: all of them, of which a rank has a share.
        taps: tokens that the convolution reaches.
        may_be_in_groups: whether a checkpoint may have the rows of each key head together.
    """

    heads: DeltaHeads
    taps: int
    may_be_in_groups: bool = False


class GatedDeltaNet(nn.Module):
    """out_proj(norm(state's answer to q) * silu(z)), of q, k, v behind a short convolution.

    One product makes q, k, v, z, b and a of a row: `in_proj`, merged of what the checkpoint holds. Its rows are those
    of all heads of q, then of k and so on, or, in a checkpoint that has them so, for each key head its own q, k, v and
    z, and then for each its b and a. The last sum has two parts: half of the key heads each, with the heads of values
    that belong to them; where these are tiled, half of the heads of values.

    `rates` are -exp(A_log) of the checkpoint: files of GGUF hold this, and others have the bits that it had there.
    """

    wide_projections = ("in_proj_b", "in_proj_a", "in_proj_ba")
    """What is never quantised while it is read: a row of weights for each head."""
    neutral_rates, neutral_norm_weight = -1.0, 1.0

    def __init__(
        self,
        size: int,
        delta: Delta,
        eps: float,
        *,
        formats: Formats,
        shard: Shard = WHOLE,
        dtype: torch.dtype,
        device,
    ) -> None:
        super().__init__()
        whole, heads, self._eps = delta.heads, delta.heads.of_rank(shard), eps
        self.heads = heads
        options, wide = dict(dtype=dtype, device=device), dict(dtype=torch.float32, device=device)
        self.in_groups = tuple(delta.may_be_in_groups and formats.holds(f"in_proj_{one}") for one in ("qkvz", "ba"))
        names, sizes = _rows(heads, *self.in_groups)
        self._holds_rates = formats.holds("rates")
        held, channels, self._values, of_sum = {}, None, None, {}
        if heads != whole:
            held, channels, self._values, columns = _held(whole, shard, *self.in_groups)
            sizes, of_sum = _sizes_of_rank(heads, *self.in_groups), dict(held=columns)
        self.in_proj = Linear(size, names, row_sizes=sizes, held=held, formats=formats, **options)
        self.conv1d = Taps(heads.num_channels, delta.taps, bias=False, held=channels, **options)
        self.rates, self.dt_bias = (
            nn.Parameter(torch.empty(heads.num_value_heads, **wide), requires_grad=False) for _ in range(2)
        )
        self.norm_weight = nn.Parameter(torch.empty(heads.value_size, **options), requires_grad=False)
        of_out, inner = formats.below("out_proj"), heads.num_value_heads * heads.value_size
        cut = _values_cut(heads) * heads.value_size
        cut = cut if cut < inner else columns_cut(inner, of_out.of("").column_block)  # a single head is divided, too
        if heads != whole:
            cut = inner
        self.out_proj = Linear(inner, size, cut=cut, formats=of_out, **of_sum, **options)
        self._order = torch.tensor(_order(heads, *self.in_groups), device=device) if any(self.in_groups) else None

    def forward(self, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], num_live: Tensor) -> Tensor:
        """Compute the input of `out_proj`, [N, heads of values * their size], and update the state."""
        operations, heads = self.in_proj.operations, self.heads
        projected = self.in_proj(normed)
        if self._order is not None:
            projected = projected.index_select(1, self._order)
        inner, count = heads.num_value_heads * heads.value_size, heads.num_value_heads
        mixed, z, b, a = projected.split((heads.num_channels, inner, count, count), dim=1)
        weight = self.conv1d.weight.squeeze(1)
        mixed = operations.causal_conv(mixed, weight, None, state["inputs"], runs, num_live)
        answers = operations.gated_delta(mixed, a, b, self.rates, self.dt_bias, state["state"], runs, num_live, heads)
        del mixed
        z = z.unflatten(1, (count, heads.value_size))
        return operations.gated_norm(answers, z, self.norm_weight, self._eps, num_live).flatten(1)

    def held_views(self) -> dict[str, Held]:
        """Return which heads of values a rank has of its own tensors."""
        if self._values is None:
            return {}
        return {ending: self._values for ending in self.checkpoint_views() if ending != "norm.weight"}

    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Return what its own tensors of a checkpoint fill, by the ends of their names."""

        def fill(values: Tensor) -> None:
            self.rates.copy_(-exact.elementwise(torch.exp, values.cpu().float()))
            if not bool(self.rates.isfinite().all()):
                raise ValueError("holds values that are NaN or too large: the file may be corrupt")

        if self._holds_rates:
            return {"rates.weight": self.rates, "dt_bias": self.dt_bias, "norm.weight": self.norm_weight}
        of_rates = Filling((tuple(self.rates.shape),), FLOATS, fill)
        return {"A_log": of_rates, "dt_bias": self.dt_bias, "norm.weight": self.norm_weight}


def num_projected(heads: DeltaHeads) -> int:
    """Return how many values are made of a row: q, k, v, z, b and a."""
    return heads.num_channels + heads.num_value_heads * (heads.value_size + 2)


def _values_cut(heads: DeltaHeads) -> int:
    """Return the heads of values of the first part of the output."""
    if heads.is_tiled and heads.num_value_heads > heads.num_key_heads:  # each half has some of every key head
        return -(-heads.num_value_heads // 2)
    return heads_cut(heads.num_value_heads, heads.num_key_heads)[0]


def _rows(
    heads: DeltaHeads, qkvz_in_groups: bool = False, ba_in_groups: bool = False
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the rows of `in_proj` by their names in the checkpoint, and how many neighbours of them one part has."""
    keys, inner = heads.num_key_heads * heads.key_size, heads.num_value_heads * heads.value_size
    count, cut = heads.num_value_heads, _values_cut(heads)
    first = heads_cut(count, heads.num_key_heads)[1]  # of the key heads
    names, sizes = {}, []
    if qkvz_in_groups:
        names["in_proj_qkvz"] = 2 * (keys + inner)
        sizes += divided(names["in_proj_qkvz"], first * names["in_proj_qkvz"] // heads.num_key_heads)
    else:
        names |= {"in_proj_qkv": 2 * keys + inner, "in_proj_z": inner}
        sizes += 2 * ((keys,) if heads.is_tiled else divided(keys, first * heads.key_size))
        sizes += 2 * divided(inner, cut * heads.value_size)
    if ba_in_groups:
        names["in_proj_ba"] = 2 * count
        sizes += divided(2 * count, first * 2 * count // heads.num_key_heads)
    else:
        names |= {"in_proj_b": count, "in_proj_a": count}
        sizes += 2 * divided(count, cut)
    return names, tuple(sizes)


def _sizes_of_rank(heads: DeltaHeads, qkvz_in_groups: bool, ba_in_groups: bool) -> tuple[int, ...]:
    """Return how many neighbouring rows of a rank's `in_proj` one part of the whole has."""
    keys, inner = heads.num_key_heads * heads.key_size, heads.num_value_heads * heads.value_size
    of_qkvz = (2 * (keys + inner),) if qkvz_in_groups else (keys, keys, inner, inner)
    return of_qkvz + ((2 * heads.num_value_heads,) if ba_in_groups else 2 * (heads.num_value_heads,))


def _held(
    heads: DeltaHeads, shard: Shard, qkvz_in_groups: bool, ba_in_groups: bool
) -> tuple[dict[str, Held], Held, Held, Held]:
    """Return which rows a rank has of what makes `in_proj`, by name; which channels, which heads of values, and which
    columns of the output. heads: of the whole layer."""
    keys, values = heads.ranges_of(shard)
    group = heads.num_value_heads // heads.num_key_heads
    of_keys = held_rows(heads.num_key_heads, *keys)
    of_values = held_rows(heads.num_value_heads, *values)
    of_inner = of_values.times(heads.value_size)
    channels = joined_rows([of_keys.times(heads.key_size), of_keys.times(heads.key_size), of_inner])
    held = {"in_proj_qkv": channels, "in_proj_z": of_inner, "in_proj_b": of_values, "in_proj_a": of_values}
    if qkvz_in_groups:
        held["in_proj_qkvz"] = of_keys.times(2 * heads.key_size + 2 * group * heads.value_size)
    if ba_in_groups:
        held["in_proj_ba"] = of_keys.times(2 * group)
    return held, channels, of_values, held_columns(heads.num_value_heads, *values, heads.value_size)


def _order(heads: DeltaHeads, qkvz_in_groups: bool, ba_in_groups: bool) -> list[int]:
    """Return where the values of q, k, v, z, b and a lie among those that are made."""
    group = heads.num_value_heads // heads.num_key_heads
    values, end = group * heads.value_size, 0
    found: list[int] = []
    for sizes, in_groups in (
        ((heads.key_size, heads.key_size, values, values), qkvz_in_groups),
        ((group, group), ba_in_groups),
    ):
        begin, end = end, end + heads.num_key_heads * sum(sizes)
        if not in_groups:
            found += range(begin, end)
            continue
        for number, size in enumerate(sizes):
            for first in range(begin + sum(sizes[:number]), end, sum(sizes)):
                found += range(first, first + size)
    return found
