"""The device operations in plain torch: where there are no kernels, and what tests compare the kernels with.

`nanoinfer.kernels.fused` has the same functions. The docstrings of the kernels say what the tensors are.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.kernels.activations import ACTIVATIONS as ACTIVATIONS
from nanoinfer.kernels.delta.reference import gated_delta as gated_delta
from nanoinfer.kernels.delta.reference import gated_norm as gated_norm
from nanoinfer.kernels.experts.reference import choose_experts as choose_experts
from nanoinfer.kernels.experts.reference import expert_mlp as expert_mlp
from nanoinfer.kernels.experts.reference import place_experts as place_experts
from nanoinfer.kernels.experts.reference import shared_mlp as shared_mlp
from nanoinfer.kernels.kv.base import KVPart
from nanoinfer.kernels.kv.plain import part_of
from nanoinfer.kernels.layer.conv_reference import causal_conv as causal_conv
from nanoinfer.kernels.layer.conv_reference import short_conv as short_conv
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.sampling.reference import apply_masks as apply_masks
from nanoinfer.sampling.reference import sample_rows as sample_rows


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_sizes=(), activation=None, out=None, library_counts=()
):
    """x @ weight.T + bias, in `out` if that is given. row_sizes: see `exact.linear`.

    activation, library_counts: unused, see `has_activation`.
    """
    return exact.linear(x, weight, bias, row_sizes, out)


def has_activation(activation: str, x: Tensor) -> bool:
    """Whether `linear` computes this activation, too: it computes none."""
    return False


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up: [N, 2 * size] -> [N, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return exact.elementwise(ACTIVATIONS[activation], gate) * up


def act(x: Tensor, activation: str) -> Tensor:
    """Compute activation(x), in place."""
    return x.copy_(exact.elementwise(ACTIVATIONS[activation], x))


def linear_parts(x: Tensor, weight: Tensor, cut: int, bias: Tensor | None = None, *, library_counts=()) -> Tensor:
    """Add x @ weight.T + bias in two parts, as `cuts` says: [1, N, num_rows] float32. library_counts: unused."""
    total = exact.wide_linear(x[:, :cut], weight[:, :cut])
    if bias is not None:
        total += bias.float()
    return total.add_(exact.wide_linear(x[:, cut:], weight[:, cut:]))[None]


def wide_linear(x: Tensor, weight: Tensor, *, library_counts=()) -> Tensor:
    """x @ weight.T of values widened to float32, not rounded: [N, num_rows] float32. library_counts: unused."""
    return exact.wide_linear(x, weight)


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a table, [rows, size]: [N] -> [N, size] in its dtype."""
    return F.embedding(ids, table)


def packed_linear(x, weight, bias=None, *, activation=None, out=None, in_parts=False) -> None:
    """None: the weight must be expanded first."""


def expand(weight, out: Tensor, ids: Tensor | None = None) -> None:
    """None: the format expands rows itself."""


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: bool,
    rounds_once: bool = False,
    other: Tensor | None = None,
    behind: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
    scale: Tensor | None = None,
    is_fresh: bool = False,
    norm_factor: float | None = None,
) -> Tensor:
    """Return the norm of x, [..., size], in `out` if that is given. With `other`, x becomes x + factor * other first.

    The weight broadcasts to x; None: x itself is returned. With `offset` it counts from 1. With `offset` or
    `rounds_once` the product is rounded once; otherwise x / rms(x) is rounded first. behind: the weight of a norm of
    `other`, which is added in place of it. scale: [1], by which the sum is multiplied. is_fresh: x counts as
    zero. norm_factor: by which the norm is multiplied.
    """
    if is_fresh:
        x.zero_()
    if other is not None:
        other = _rounded_sum(other, x)
        if behind is not None:
            other = rms_norm(other, behind, eps, offset=offset, rounds_once=rounds_once)
        x += other if factor is None else other * factor
        if scale is not None:
            x *= scale
    if weight is None:
        return x
    wide = x.float()
    normed = wide * exact.elementwise(torch.rsqrt, (wide * wide).mean(-1, keepdim=True).add_(eps))
    if offset or rounds_once:
        result = (normed * (weight.float() + offset)).to(x.dtype)
    else:
        result = weight * normed.to(x.dtype)
    if norm_factor is not None:
        result = result * norm_factor
    return result if out is None else out.copy_(result)


def joined_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    first: Tensor,
    second: Tensor,
    behind: tuple[Tensor, Tensor, Tensor],
    *,
    offset: bool,
    rounds_once: bool = False,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    mailbox=None,
) -> Tensor:
    """Return the norm of x, in `out` if that is given; x becomes (x + norm(norm(first) + norm(second))) * scale first.

    first, second: the parts of two sums, as of `rms_norm`; behind: the weights of their norms, and of that of what
    these give together. mailbox: of ranks, of which each gives its own part of both, [N, size] float32.
    """
    if mailbox is not None:
        own = torch.stack((first, second))
        parts = mailbox.gather(own.view(-1).view(torch.int32)).view(torch.float32).view(-1, *own.shape)
        first, second = parts.unbind(1)
    how, (of_first, of_second, of_both) = dict(offset=offset, rounds_once=rounds_once), behind
    both = rms_norm(torch.empty_like(x), None, eps, other=first, behind=of_first, is_fresh=True, **how)
    both = rms_norm(both, of_both, eps, other=second, behind=of_second, **how)
    return rms_norm(x, weight, eps, other=both, out=out, scale=scale, **how)


def two_norms(
    x: Tensor, weights: tuple[Tensor, Tensor], eps: float, rounding: tuple[tuple[bool, bool], ...], norm_factor: float
) -> tuple[Tensor, Tensor]:
    """Return two norms of x, [N, size], the second times `norm_factor`, as `rms_norm` does. rounding: of each `offset`
    and `rounds_once`."""
    (first, second), ((offset, once), (second_offset, second_once)) = weights, rounding
    one = rms_norm(x, first, eps, offset=offset, rounds_once=once)
    return one, rms_norm(x, second, eps, offset=second_offset, rounds_once=second_once, norm_factor=norm_factor)


def exchange_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    own: Tensor,
    mailbox,
    *,
    offset: bool,
    rounds_once: bool = False,
    behind: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
    scale: Tensor | None = None,
    is_fresh: bool = False,
    norm_factor: float | None = None,
) -> Tensor:
    """Return what `rms_norm` does with the parts of all ranks as `other`. own: [N, size] float32, this rank's."""
    parts = mailbox.gather(own.view(-1).view(torch.int32)).view(torch.float32).view(-1, *own.shape)
    how = dict(offset=offset, rounds_once=rounds_once, behind=behind, out=out, factor=factor, scale=scale)
    return rms_norm(x, weight, eps, other=parts, is_fresh=is_fresh, norm_factor=norm_factor, **how)


def _rounded_sum(other: Tensor, x: Tensor) -> Tensor:
    """Return what is added to x: the parts of a sum, [parts, ...] float32, are added in order, and rounded once."""
    return other if other.dim() == x.dim() else reduce(torch.add, other.unbind()).to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    offset: bool,
    other: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
) -> Tensor:
    """Return (x - mean(x)) / std(x) * weight + bias as `rms_norm` returns its norm; with `offset` of weight + 1."""
    if other is not None:
        other = _rounded_sum(other, x)
        x += other if factor is None else other * factor
    # Each row is computed by itself.
    result = F.layer_norm(x, x.shape[-1:], weight + 1.0 if offset else weight, bias, eps)
    return result if out is None else out.copy_(result)


def apply_rope(
    x: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False, distance: int | None = None
) -> Tensor:
    """Rotate every head of x: [N, num_heads, head_dim], at positions [N] int64; returns a new contiguous tensor.

    table: [max_position, rotary_dim] cosines and sines, for the first rotary_dim elements of each head. In x's dtype:
    the products are rounded to it before they are added, as in transformers (x * cos + rotate_half(x) * sin). In
    float32: the sum alone is rounded. interleaved: pairs are neighbours, and not half of rotary_dim apart; distance: or
    so many elements apart.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    if distance is not None:
        first, second = x[..., : cos.shape[-1]], x[..., distance : distance + cos.shape[-1]]
        result = x.clone()
        result[..., : cos.shape[-1]] = (first * cos - second * sin).to(x.dtype)
        result[..., distance : distance + cos.shape[-1]] = (second * cos + first * sin).to(x.dtype)
        return result
    turned, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def norm_rope_store(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor | None] | None,
    steps: HeadSteps,
    table: Tensor | None,
    positions: Tensor,
    kv: Tensor | None,
    slots: Tensor,
    q: Tensor,
    *,
    q_scales: Tensor | None = None,
    part: KVPart | None = None,
    gates: Tensor | None = None,
) -> None:
    """Apply norm and rotation to query and key heads; write queries to `q`, keys and values to their slots of `kv`."""
    num_q_heads = q.shape[1]
    if gates is not None:
        pairs, others = qkv.split((2 * num_q_heads, qkv.shape[1] - 2 * num_q_heads), dim=1)
        gates.copy_(exact.elementwise(torch.sigmoid, pairs[:, 1::2]))
        qkv = torch.cat((pairs[:, ::2], others), dim=1)
    num_kv_heads = 0 if kv is None else (part_of(kv) if part is None else part).num_kv_heads
    qk = qkv[:, : num_q_heads + num_kv_heads]
    v = qkv[:, qkv.shape[1] - num_kv_heads :]  # of the keys' projection, where there is no other
    if steps.norms_values:
        v = rms_norm(v, torch.ones((), dtype=v.dtype), steps.eps, offset=False)
    if weights is not None and not steps.norm_last:
        qk = _norm_of_heads(qk, weights, num_q_heads, steps)
    if steps.clip is not None:
        qk, v = qk.clamp(-steps.clip, steps.clip), v.clamp(-steps.clip, steps.clip)
    if table is not None:
        qk = apply_rope(qk, table, positions, interleaved=steps.interleaved, distance=steps.distance)
    if weights is not None and steps.norm_last:
        qk = _norm_of_heads(qk, weights, num_q_heads, steps)
    rotated, k = qk.split((num_q_heads, num_kv_heads), dim=1)
    rotated = rotated if q_scales is None else rotated * q_scales.index_select(0, positions)[:, None, None]
    q.copy_(rotated if part is None else part.format.turn(rotated))
    if kv is not None:
        part = part_of(kv) if part is None else part
        part.store(part.format.turn(k), v, kv, slots)


def _norm_of_heads(qk: Tensor, weights: tuple[Tensor, Tensor | None], num_q_heads: int, steps: HeadSteps) -> Tensor:
    """qk: [N, num_q_heads + num_kv_heads, head_dim]; weights: [head_dim] each, or of all heads together."""
    weights = weights if weights[1] is not None else weights[:1]
    counts = (num_q_heads, qk.shape[1] - num_q_heads)[: len(weights)]
    if weights[0].numel() == qk.shape[2]:
        # [num_qk_heads, head_dim]: each head with its own weight.
        weight = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, counts, strict=True)])
        return rms_norm(qk, weight, steps.eps, offset=steps.offset, rounds_once=steps.rounds_once)
    parts = [
        rms_norm(part.flatten(1), weight, steps.eps, offset=steps.offset, rounds_once=steps.rounds_once).view_as(part)
        for part, weight in zip(qk.split(counts, dim=1), weights, strict=True)
    ]
    return torch.cat(parts, dim=1)


def update_rows(lines: Tensor, state: tuple[Tensor, ...], kept: int) -> None:
    """Write lines [n, 3 + width] (row, token, length, block table) into the rows; `kept` keeps a row's token."""
    (row_tokens, row_lengths, block_table), rows, tokens = state, lines[:, 0].long(), lines[:, 1].long()
    row_tokens.index_copy_(0, rows, torch.where(tokens == kept, row_tokens[rows], tokens))
    row_lengths.index_copy_(0, rows, lines[:, 2])
    block_table.index_copy_(0, rows, lines[:, 3:])


def step_inputs(batch_rows: Tensor, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...], sizes: Tensor) -> None:
    """Write for each batch row its token, its length with that token, and the token's position and slots."""
    (row_tokens, row_lengths, block_table), (tokens, lengths, positions, slots) = state, inputs
    tokens.copy_(row_tokens.index_select(0, batch_rows))
    lengths.copy_(row_lengths.index_select(0, batch_rows))
    positions.copy_(lengths - 1)
    begins = torch.arange(0, block_table.shape[1], block_table.shape[1] // len(sizes), device=sizes.device)[:, None]
    sizes = sizes[:, None]
    slots.copy_(block_table[batch_rows.long(), begins + positions // sizes] * sizes + positions % sizes)
