"""Head norms (where the model has them), rotation and the store of keys and values into their slots, in one kernel.

It takes the fused QKV output. A launch for each of these would cost more than its work.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.kv.base import KVPart
from nanoinfer.kernels.kv.plain import part_of
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.kernels.layer.rms_norm import rounded

HEADS_PER_PROGRAM = 8


@triton.jit
def mean_square(first, second, rest, SIZE: tl.constexpr, HAS_REST: tl.constexpr):
    """The mean of the squares of each head, [HEADS, 1]."""
    total = tl.sum(first * first + second * second, axis=1)[:, None]
    if HAS_REST:
        total += tl.sum(rest * rest, axis=1)[:, None]
    return total / SIZE


@triton.jit
def mean_square_of_all(heads, COUNT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """The mean of the squares of a token's COUNT heads of SIZE values together; heads: where they begin."""
    row = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    for begin in tl.static_range(0, COUNT, HEADS):
        inside = (begin + row < COUNT) & (column < SIZE)
        value = tl.load(heads + (begin + row) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    return tl.sum(tl.sum(total, axis=1), axis=0) / (COUNT * SIZE)


@triton.jit
def head_weight(
    q_weight, k_weight, head, at, inside,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """Return the norm's weights at the columns `at` of each head, as float32."""
    if OF_ALL:
        k_head = head - NUM_Q_HEADS
        is_k = (k_head >= 0) & (k_head < NUM_KV_HEADS)
        of_q = tl.load(q_weight + head * SIZE + at, mask=inside & (k_head < 0), other=0.0)
        of_k = tl.load(k_weight + k_head * SIZE + at, mask=inside & is_k, other=0.0)
    else:
        of_q = tl.load(q_weight + at, mask=inside, other=0.0)
        of_k = tl.load(k_weight + at, mask=inside, other=0.0)
    return tl.where(head < NUM_Q_HEADS, of_q, of_k).to(tl.float32)


@triton.jit
def cut(value, clip):
    """The value within [-clip, clip]; a NaN stays one."""
    return tl.clamp(value, -clip, clip, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled(value, scale, weight, like, OFFSET: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """The norm of values whose 1 / rms is `scale`."""
    if OFFSET:
        return rounded(value * scale * (1.0 + weight), like)
    elif ROUNDS_ONCE:
        return rounded(value * scale * weight, like)
    else:
        return rounded(rounded(value * scale, like) * weight, like)


@triton.jit
def whole_heads(
    first, second, rest,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, DISTANCE: tl.constexpr, TILE: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Join the parts of heads: [HEADS, TILE] twice and [HEADS, REST] -> [HEADS, WIDTH]."""
    column = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], [HEADS, WIDTH])
    if INTERLEAVED:
        is_second = column % 2 == 1
        at = column // 2
    else:
        is_second = column >= DISTANCE
        at = tl.where(is_second, column - DISTANCE, column)
    in_pair = at < HALF
    at = tl.minimum(at, TILE - 1)
    joined = tl.where(is_second, tl.gather(second, at, 1), tl.gather(first, at, 1))
    if REST:
        at = column - 2 * HALF if INTERLEAVED else tl.where(is_second, column - 2 * HALF, column - HALF)
        at = tl.minimum(tl.maximum(at, 0), REST - 1)
        joined = tl.where(in_pair, joined, tl.gather(rest, at, 1))
    return joined


@triton.jit(do_not_specialize=["qkv_stride"], do_not_specialize_on_alignment=["positions", "slots"])
def norm_rope_store_kernel(
    qkv,  # [N, at least NUM_Q_HEADS + 2 * NUM_KV_HEADS, SIZE], tokens qkv_stride apart; without values with FROM_KEYS,
    # with gates behind each head of queries one of its gate
    q_weight,  # [SIZE], or with OF_ALL [NUM_Q_HEADS, SIZE]; read with NORM or NORM_LAST
    k_weight,
    table,  # [max_position, 2 * HALF]: cosines, sines; read with TURN
    q_scales,  # [max_position], read with SCALE
    positions,  # [N] int64
    slots,  # [N] int32 or int64
    q,  # [N, NUM_Q_HEADS, SIZE]
    kv,  # blocks as `KVPart.view` returns them, STRIDE values apart
    gates,  # [N, NUM_Q_HEADS, SIZE]; None: there are none
    qkv_stride,
    eps,
    clip,
    STORE: tl.constexpr,  # the format's function
    STORES_HEADS: tl.constexpr,  # as in `KVKernels`
    TURN_HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,  # of a head
    HALF: tl.constexpr,  # pairs of a head that are turned; with no TURN half of the head
    DISTANCE: tl.constexpr,  # between the two of a pair, as in `HeadSteps`
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,  # the tile of a whole head
    REST: tl.constexpr,  # the tile of the columns of no pair, 0: there are none
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OF_ALL: tl.constexpr,
    NORM_LAST: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    FROM_KEYS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    TURN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLIP: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    in_half = column < HALF
    is_head = head < NUM_Q_HEADS + 2 * NUM_KV_HEADS
    inside = is_head & in_half
    if INTERLEAVED:
        first_at = 2 * column
        second_at = 2 * column + 1
    else:
        first_at = column
        second_at = DISTANCE + column
    if TURN:
        row = table + tl.load(positions + token) * (2 * HALF) + column
        cos = tl.load(row, mask=in_half, other=0.0).to(tl.float32)
        sin = tl.load(row + HALF, mask=in_half, other=0.0).to(tl.float32)
    if SCALE:
        q_scale = tl.load(q_scales + tl.load(positions + token)).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    is_q = head < NUM_Q_HEADS
    is_v = head >= NUM_Q_HEADS + NUM_KV_HEADS
    if REST:
        rest_at = HALF + tl.arange(0, REST)[None, :]
        rest_at += HALF if INTERLEAVED else tl.where(rest_at < DISTANCE, 0, HALF)
        in_rest = is_head & (rest_at < SIZE)
    if NORM or NORM_LAST:
        first_weight = head_weight(q_weight, k_weight, head, first_at, in_half, NUM_Q_HEADS, NUM_KV_HEADS, SIZE, OF_ALL)
        second_weight = head_weight(
            q_weight, k_weight, head, second_at, in_half, NUM_Q_HEADS, NUM_KV_HEADS, SIZE, OF_ALL
        )
        if REST:
            rest_weight = head_weight(
                q_weight, k_weight, head, rest_at, rest_at < SIZE, NUM_Q_HEADS, NUM_KV_HEADS, SIZE, OF_ALL
            )
    wait_for_inputs(PDL)
    let_next_in(PDL)
    # heads of a token are whole multiples of 16 values apart
    own = qkv + token * tl.multiple_of(qkv_stride, 16)
    place = tl.where(is_v, head - NUM_KV_HEADS, head) if FROM_KEYS else head
    if gates is not None:
        place = tl.where(is_q, 2 * head, head + NUM_Q_HEADS)
    source = own + place * SIZE
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    value_first = first
    value_second = second
    rest = first
    if REST:
        rest = tl.load(source + rest_at, mask=in_rest, other=0.0).to(tl.float32)
        value_rest = rest
    if NORM_VALUES:
        scale = tl.rsqrt(mean_square(first, second, rest, SIZE, REST > 0) + eps)
        value_first = rounded(first * scale, qkv)
        value_second = rounded(second * scale, qkv)
        if REST:
            value_rest = rounded(rest * scale, qkv)
    if NORM:
        if OF_ALL:
            mean_q = mean_square_of_all(own, NUM_Q_HEADS, SIZE, WIDTH, HEADS)
            mean_k = mean_square_of_all(own + NUM_Q_HEADS * SIZE, NUM_KV_HEADS, SIZE, WIDTH, HEADS)
            mean = tl.where(is_q, mean_q, mean_k)
        else:
            mean = mean_square(first, second, rest, SIZE, REST > 0)
        scale = tl.rsqrt(mean + eps)
        first = scaled(first, scale, first_weight, qkv, OFFSET, ROUNDS_ONCE)
        second = scaled(second, scale, second_weight, qkv, OFFSET, ROUNDS_ONCE)
        if REST:
            rest = scaled(rest, scale, rest_weight, qkv, OFFSET, ROUNDS_ONCE)
    if CLIP:
        first = rounded(cut(first, clip), qkv)
        second = rounded(cut(second, clip), qkv)
        value_first = rounded(cut(value_first, clip), qkv)
        value_second = rounded(cut(value_second, clip), qkv)
        if REST:
            rest = rounded(cut(rest, clip), qkv)
            value_rest = rounded(cut(value_rest, clip), qkv)
    if TURN:
        if IN_FLOAT32:
            turned_first = rounded(first * cos - second * sin, qkv)
            turned_second = rounded(second * cos + first * sin, qkv)
        else:
            turned_first = rounded(rounded(first * cos, qkv) - rounded(second * sin, qkv), qkv)
            turned_second = rounded(rounded(second * cos, qkv) + rounded(first * sin, qkv), qkv)
    else:
        turned_first = first
        turned_second = second
    if NORM_LAST:
        scale = tl.rsqrt(mean_square(turned_first, turned_second, rest, SIZE, REST > 0) + eps)
        turned_first = scaled(turned_first, scale, first_weight, qkv, OFFSET, ROUNDS_ONCE)
        turned_second = scaled(turned_second, scale, second_weight, qkv, OFFSET, ROUNDS_ONCE)
        if REST:
            rest = scaled(rest, scale, rest_weight, qkv, OFFSET, ROUNDS_ONCE)
    if SCALE:
        turned_first = tl.where(is_q, rounded(turned_first * q_scale, qkv), turned_first)
        turned_second = tl.where(is_q, rounded(turned_second * q_scale, qkv), turned_second)
        if REST:
            rest = tl.where(is_q, rounded(rest * q_scale, qkv), rest)
    result_first = tl.where(is_v, value_first, turned_first)
    result_second = tl.where(is_v, value_second, turned_second)
    result_rest = result_first
    if REST:
        result_rest = tl.where(is_v, value_rest, rest)

    every = tl.arange(0, WIDTH)[None, :]
    if gates is not None:
        of_gate = is_q & (every < SIZE)
        gate = tl.load(own + (2 * head + 1) * SIZE + every, mask=of_gate, other=0.0).to(tl.float32)
        at_gate = gates + (token * NUM_Q_HEADS + head) * SIZE + every
        tl.store(at_gate, tl.sigmoid(gate).to(gates.dtype.element_ty), mask=of_gate)
    if STORES_HEADS:
        heads = whole_heads(
            result_first, result_second, result_rest, HEADS, WIDTH, HALF, DISTANCE, TILE, REST, INTERLEAVED
        )
        heads = tl.where(is_head & (every < SIZE), heads, 0.0)
    q_target = q + (token * NUM_Q_HEADS + head) * SIZE
    if TURN_HEADS is not None:
        heads = tl.where(is_v, heads, rounded(TURN_HEADS(heads, SIZE), qkv))
        tl.store(q_target + every, heads.to(q.dtype.element_ty), mask=is_q & (every < SIZE))
    else:
        tl.store(q_target + first_at, result_first.to(q.dtype.element_ty), mask=inside & is_q)
        tl.store(q_target + second_at, result_second.to(q.dtype.element_ty), mask=inside & is_q)
        if REST:
            tl.store(q_target + rest_at, result_rest.to(q.dtype.element_ty), mask=in_rest & is_q)
    kv_head = tl.where(is_v, head - NUM_Q_HEADS - NUM_KV_HEADS, head - NUM_Q_HEADS)
    block = slot // BLOCK_SIZE
    at = slot % BLOCK_SIZE
    is_kv = inside & (head >= NUM_Q_HEADS)
    if NUM_KV_HEADS > 0 and slot >= 0:
        if STORES_HEADS:
            is_own = is_head & (head >= NUM_Q_HEADS) & (every < SIZE)
            STORE(kv, block, at, kv_head, is_v, every, heads, is_own, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, SIZE)
        else:
            STORE(kv, block, at, kv_head, is_v, first_at, result_first, is_kv, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, SIZE)
            STORE(kv, block, at, kv_head, is_v, second_at, result_second, is_kv, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, SIZE)
            if REST:
                is_rest = in_rest & (head >= NUM_Q_HEADS)
                STORE(
                    kv, block, at, kv_head, is_v, rest_at, result_rest, is_rest, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, SIZE
                )


def norm_rope_store(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor] | None,
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
    """Apply norm and rotation to query and key heads; write queries to `q`, keys and values to their slots of `kv`.

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim], heads packed; without values, where these are made of the
    projection that makes keys; weights: of the query and the key norm, [head_dim]
    each, or [num_q_heads * head_dim] and [num_kv_heads * head_dim] for a norm over all heads; table: [max_position,
    rotary_dim] cosines and sines of a head's pairs, in qkv's dtype or float32; positions: [N]
    int64; kv: blocks as `KVPart.view` returns them, None: the heads are all queries; slots: [N] int32 or int64, block *
    block_size + offset, a negative one is skipped; q: [N, num_q_heads, head_dim], packed; q_scales: [max_position] in
    qkv's dtype, factors on the queries behind the rotation; part: how blocks lie, None: plain, as kv says; gates: as q:
    behind each query head of qkv lies a head of its gate, whose sigmoid is written there, None: there are none.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    part, blocks = part_of(q[:, None, None] if kv is None else kv) if part is None else part, q if kv is None else kv
    num_q_heads, num_kv_heads, kernels = q.shape[1], 0 if kv is None else part.num_kv_heads, part.format.kernels()
    from_keys = gates is None and num_kv_heads > 0 and num_heads == num_q_heads + num_kv_heads
    num_heads += num_kv_heads * from_keys - num_q_heads * (gates is not None)
    assert num_heads == num_q_heads + 2 * num_kv_heads, f"{num_heads} heads"
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "heads of a token must be packed"
    assert gates is None or gates.is_contiguous() and (weights is None or weights[0].numel() == head_dim)
    assert q.is_contiguous() and blocks[:1].is_contiguous(), "q and blocks of kv must be packed"
    assert qkv.data_ptr() % 16 == 0, "qkv must be aligned: another alignment would be another binary"
    if num_tokens == 0:
        return
    q_weight, k_weight = (qkv, qkv) if weights is None else weights
    k_weight = q_weight if k_weight is None else k_weight  # there are no keys
    of_all = q_weight.numel() != head_dim and weights is not None
    assert not (of_all and steps.norm_last), "a norm behind the rotation is one of each head"
    half = (head_dim if table is None else table.shape[1]) // 2
    norm_rope_store_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        qkv, q_weight, k_weight, qkv if table is None else table, qkv if q_scales is None else q_scales, positions,
        slots, q, blocks, gates, qkv.stride(0), steps.eps, 0.0 if steps.clip is None else steps.clip,
        STORE=kernels.store, STORES_HEADS=kernels.stores_heads, TURN_HEADS=kernels.turn, STRIDE=blocks.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=part.block_size, SIZE=head_dim, HALF=half,
        DISTANCE=half if table is None or steps.distance is None else steps.distance,
        TILE=next_power_of_2(half), WIDTH=next_power_of_2(head_dim),
        REST=next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        HEADS=HEADS_PER_PROGRAM, NORM=weights is not None and not steps.norm_last, OF_ALL=of_all,
        NORM_LAST=weights is not None and steps.norm_last, NORM_VALUES=steps.norms_values, FROM_KEYS=from_keys,
        OFFSET=steps.offset, ROUNDS_ONCE=steps.rounds_once,
        TURN=table is not None, IN_FLOAT32=table is not None and table.dtype != qkv.dtype,
        INTERLEAVED=steps.interleaved, CLIP=steps.clip is not None, SCALE=q_scales is not None,
        num_warps=4, **launch_options(qkv),
    )  # fmt: skip
