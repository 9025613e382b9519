"""The device functions of one vector for keys and values; see `one_vector`."""

import triton
import triton.language as tl

from nanoinfer.kernels.kv.quantized_kernels import loaded, part_of, read_eight, scales_at, store_eight

NARROW = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter multiplies no bfloat16


@triton.jit
def vectors_of(kv, block, STRIDE: tl.constexpr, DTYPE: tl.constexpr):
    return (kv + block.to(tl.int64) * STRIDE).to(tl.pointer_type(DTYPE))


@triton.jit
def store_values(
    kv, block, row, is_v, columns, values, mask, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr
):
    target = vectors_of(kv, block, STRIDE, DTYPE) + row * HEAD_DIM + columns
    tl.store(target, values.to(DTYPE), mask=mask & is_v)


@triton.jit
def store_bfloat16(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = token * NUM_KV_HEADS + head
    store_values(kv, block, row, is_v, columns, values, mask, STRIDE, HEAD_DIM, tl.bfloat16)


@triton.jit
def store_float16(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = token * NUM_KV_HEADS + head
    store_values(kv, block, row, is_v, columns, values, mask, STRIDE, HEAD_DIM, tl.float16)


@triton.jit
def store_float32(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = token * NUM_KV_HEADS + head
    store_values(kv, block, row, is_v, columns, values, mask, STRIDE, HEAD_DIM, tl.float32)


@triton.jit
def halves(heads):
    """Return the two halves of each row: [rows, 2 * half] -> [rows, half] twice."""
    HALF: tl.constexpr = heads.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(heads, (heads.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def joined(first, second):
    """The reverse of `halves`."""
    parts = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(parts, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def read_one(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, HEAD_DIM)[None, :]
    row = (token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head
    vectors = vectors_of(kv, block, STRIDE, like.dtype) + row[:, None] * HEAD_DIM + columns
    if MASKED:
        v = tl.load(vectors, mask=exists[:, None], other=0.0)
    else:
        v = tl.load(vectors)
    return keys_of(v, own, positions, exists).T, v


@triton.jit
def store_int8(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row, part = token * NUM_KV_HEADS + head, part_of(kv, block, STRIDE)
    codes = part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM
    scales = scales_at(part, BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, row, 2)
    store_eight(codes, scales, columns, values, mask & is_v)
    store_eight(codes, scales + 1, columns, values, mask & is_v)


@triton.jit
def read_int8(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, HEAD_DIM)[None, :]
    row = ((token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head)[:, None]
    part = part_of(kv, block, STRIDE)
    # The scale stands twice in a word, because of two bytes a load is not begun ahead.
    word = (part + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.int32)) + row
    scale = (loaded(word, exists[:, None], MASKED) << 16).to(tl.float32, bitcast=True)
    codes = part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM
    v = read_eight(codes, scale, columns, exists[:, None], HEAD_DIM, MASKED).to(like.dtype)
    return keys_of(v, own, positions, exists).T, v


@triton.jit
def keys_of(v, own, positions, exists):
    """Return the keys of values, [tokens, a power of two]. own: as `OneVector.own` returns it."""
    HEAD_DIM: tl.constexpr = v.shape[1]
    HALF: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HEAD_DIM)[None, :]
    if NARROW:  # two factors of 16 bits have a product that is rounded once
        scaled = v * tl.load(own[1] + columns)
    else:
        scaled = (v.to(tl.float32) * tl.load(own[1] + columns).to(tl.float32)).to(v.dtype)
    PAIRS: tl.constexpr = own[2]
    QUARTER: tl.constexpr = 4 * PAIRS <= HEAD_DIM  # what turns lies within the first quarter of each half
    first, second = halves(scaled)
    if QUARTER:
        first, first_rest = halves(first)
        second, second_rest = halves(second)
    pair = tl.arange(0, HALF // 2 if QUARTER else HALF)[None, :]
    turned = exists[:, None] & (pair < PAIRS)
    table = own[0] + positions[:, None] * (2 * PAIRS) + pair
    first, second = turn(
        first, second, tl.load(table, mask=turned, other=1.0), tl.load(table + PAIRS, mask=turned, other=0.0)
    )
    if QUARTER:
        first = joined(first, first_rest)
        second = joined(second, second_rest)
    return joined(first, second)


@triton.jit
def turn(first, second, cos, sin):
    """Products are rounded before they are added, as in `norm_rope_store`."""
    DTYPE: tl.constexpr = first.dtype
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    new_first = (wide_first * cos).to(DTYPE).to(tl.float32) - (wide_second * sin).to(DTYPE).to(tl.float32)
    new_second = (wide_second * cos).to(DTYPE).to(tl.float32) + (wide_first * sin).to(DTYPE).to(tl.float32)
    return new_first.to(DTYPE), new_second.to(DTYPE)
