"""Head norms (where the model has them), rotation and the store of keys and values into their slots, in one kernel.

It takes the fused QKV output. A launch for each of these would cost more than its work.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.rms_norm import rounded

HEADS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["qkv_stride"], do_not_specialize_on_alignment=["positions", "slots"])
def norm_rope_store_kernel(
    qkv,  # [N, at least NUM_Q_HEADS + 2 * NUM_KV_HEADS, 2 * HALF], tokens qkv_stride apart
    q_weight,  # [2 * HALF], read with NORM
    k_weight,
    table,  # [max_position, 2 * HALF]: cosines, sines
    positions,  # [N] int64
    slots,  # [N] int32 or int64
    q,  # [N, NUM_Q_HEADS, 2 * HALF]
    kv,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF]
    qkv_stride,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    in_half = column < HALF
    inside = (head < NUM_Q_HEADS + 2 * NUM_KV_HEADS) & in_half
    row = table + tl.load(positions + token) * (2 * HALF) + column
    cos = tl.load(row, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, mask=in_half, other=0.0).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    is_q = head < NUM_Q_HEADS
    is_v = head >= NUM_Q_HEADS + NUM_KV_HEADS
    if NORM:
        first_q = tl.load(q_weight + column, mask=in_half, other=0.0)
        first_k = tl.load(k_weight + column, mask=in_half, other=0.0)
        second_q = tl.load(q_weight + HALF + column, mask=in_half, other=0.0)
        second_k = tl.load(k_weight + HALF + column, mask=in_half, other=0.0)
        first_weight = tl.where(is_q, first_q, first_k).to(tl.float32)
        second_weight = tl.where(is_q, second_q, second_k).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    # heads of a token are whole multiples of 16 values apart
    source = qkv + token * tl.multiple_of(qkv_stride, 16) + head * (2 * HALF) + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    value_first = first
    value_second = second
    if NORM:
        mean = tl.sum(first * first + second * second, axis=1)[:, None] / (2 * HALF)
        scale = tl.rsqrt(mean + eps)
        if OFFSET:
            first = rounded(first * scale * (1.0 + first_weight), qkv)
            second = rounded(second * scale * (1.0 + second_weight), qkv)
        else:
            first = rounded(rounded(first * scale, qkv) * first_weight, qkv)
            second = rounded(rounded(second * scale, qkv) * second_weight, qkv)
    turned_first = rounded(rounded(first * cos, qkv) - rounded(second * sin, qkv), qkv)
    turned_second = rounded(rounded(second * cos, qkv) + rounded(first * sin, qkv), qkv)
    result_first = tl.where(is_v, value_first, turned_first)
    result_second = tl.where(is_v, value_second, turned_second)

    q_target = q + (token * NUM_Q_HEADS + head) * (2 * HALF) + column
    tl.store(q_target, result_first.to(q.dtype.element_ty), mask=inside & is_q)
    tl.store(q_target + HALF, result_second.to(q.dtype.element_ty), mask=inside & is_q)
    kv_head = tl.where(is_v, head - NUM_Q_HEADS - NUM_KV_HEADS, head - NUM_Q_HEADS)
    in_block = tl.where(is_v, BLOCK_SIZE, 0) + slot % BLOCK_SIZE
    place = (slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + in_block) * NUM_KV_HEADS + kv_head
    kv_target = kv + place * (2 * HALF) + column
    is_kv = inside & (head >= NUM_Q_HEADS)
    if FP8:  # has no infinity
        result_first = tl.clamp(result_first, -448.0, 448.0)
        result_second = tl.clamp(result_second, -448.0, 448.0)
    if slot >= 0:
        tl.store(kv_target, result_first.to(kv.dtype.element_ty), mask=is_kv)
        tl.store(kv_target + HALF, result_second.to(kv.dtype.element_ty), mask=is_kv)


def norm_rope_store(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: bool,
    table: Tensor,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
    q: Tensor,
) -> None:
    """Apply norm and rotation to query and key heads; write queries to `q`, keys and values to their slots of `kv`.

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim], heads packed; weights: of the query and the key norm, [head_dim]
    each; table: [max_position, head_dim] cosines and sines; positions: [N] int64; kv: [num_blocks, 2, block_size,
    num_kv_heads, head_dim]; slots: [N] int32 or int64, block * block_size + offset, a negative one is skipped; q: [N,
    num_q_heads, head_dim], packed.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_q_heads, num_kv_heads = q.shape[1], kv.shape[3]
    assert num_heads == num_q_heads + 2 * num_kv_heads, f"{num_heads} heads"
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "heads of a token must be packed"
    assert q.is_contiguous() and kv.is_contiguous(), "q and kv must be packed"
    assert qkv.data_ptr() % 16 == 0, "qkv must be aligned: another alignment would be another binary"
    if num_tokens == 0:
        return
    q_weight, k_weight = (qkv, qkv) if weights is None else weights
    norm_rope_store_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        qkv, q_weight, k_weight, table, positions, slots, q, kv, qkv.stride(0), eps,
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=kv.shape[2], HALF=head_dim // 2,
        TILE=next_power_of_2(head_dim // 2), HEADS=HEADS_PER_PROGRAM, NORM=weights is not None, OFFSET=offset,
        FP8=kv.dtype.itemsize == 1,
        num_warps=4, **launch_options(qkv),
    )  # fmt: skip
