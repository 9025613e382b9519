"""Norm (where the model has one) and rotation of query and key heads, in one pass over the fused QKV output."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.rms_norm import rounded
from nanoinfer.kernels.shape import next_power_of_2

HEADS_PER_PROGRAM = 8


@triton.jit(do_not_specialize_on_alignment=["positions"])
def norm_rope_kernel(
    qkv,  # [N, at least NUM_HEADS, 2 * HALF], tokens qkv_stride apart
    q_weight,  # [2 * HALF], read with NORM
    k_weight,
    table,  # [max_position, 2 * HALF]: cosines, sines
    positions,  # [N] int64
    out,  # [N, NUM_HEADS, 2 * HALF]
    qkv_stride,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # query and key heads
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    inside = (head < NUM_HEADS) & (column < HALF)
    source = qkv + token * qkv_stride + head * (2 * HALF) + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, axis=1)[:, None] / (2 * HALF)
        scale = tl.rsqrt(mean + eps)
        in_half = column < HALF
        is_q = head < NUM_Q_HEADS
        first_q = tl.load(q_weight + column, mask=in_half, other=0.0)
        first_k = tl.load(k_weight + column, mask=in_half, other=0.0)
        second_q = tl.load(q_weight + HALF + column, mask=in_half, other=0.0)
        second_k = tl.load(k_weight + HALF + column, mask=in_half, other=0.0)
        first_weight = tl.where(is_q, first_q, first_k).to(tl.float32)
        second_weight = tl.where(is_q, second_q, second_k).to(tl.float32)
        if OFFSET:
            first = rounded(first * scale * (1.0 + first_weight), qkv)
            second = rounded(second * scale * (1.0 + second_weight), qkv)
        else:
            first = rounded(rounded(first * scale, qkv) * first_weight, qkv)
            second = rounded(rounded(second * scale, qkv) * second_weight, qkv)
    row = table + tl.load(positions + token) * (2 * HALF) + column
    cos = tl.load(row, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    target = out + token * (NUM_HEADS * 2 * HALF) + head * (2 * HALF) + column
    turned_first = rounded(first * cos, qkv) - rounded(second * sin, qkv)
    turned_second = rounded(second * cos, qkv) + rounded(first * sin, qkv)
    tl.store(target, turned_first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, turned_second.to(out.dtype.element_ty), mask=inside)


def norm_rope(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: bool,
    table: Tensor,
    positions: Tensor,
) -> Tensor:
    """Norm and rotation of the query and key heads.

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim], heads packed; weights: of the query and the key norm, [head_dim]
    each; table: [max_position, head_dim] cosines and sines; positions: [N] int64.
    Returns the query and key heads, [N, num_q_heads + num_kv_heads, head_dim].
    """
    num_tokens, _, head_dim = qkv.shape
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "heads of a token must be packed"
    assert qkv.data_ptr() % 16 == 0, "qkv must be aligned: another alignment would be another binary"
    num_heads = num_q_heads + num_kv_heads
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        q_weight, k_weight = (qkv, qkv) if weights is None else weights
        norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            qkv, q_weight, k_weight, table, positions, out, qkv.stride(0), eps,
            NUM_Q_HEADS=num_q_heads, NUM_HEADS=num_heads, HALF=head_dim // 2, TILE=next_power_of_2(head_dim // 2),
            HEADS=HEADS_PER_PROGRAM, NORM=weights is not None, OFFSET=offset, num_warps=4,
        )  # fmt: skip
    return out
