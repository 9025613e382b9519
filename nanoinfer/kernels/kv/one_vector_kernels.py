"""The device functions of one vector for keys and values; see `one_vector`."""

import triton
import triton.language as tl


@triton.jit
def vectors_of(kv, block, STRIDE: tl.constexpr, DTYPE: tl.constexpr):
    return (kv + block.to(tl.int64) * STRIDE).to(tl.pointer_type(DTYPE))


@triton.jit
def store_bfloat16(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    target = vectors_of(kv, block, STRIDE, tl.bfloat16) + (token * NUM_KV_HEADS + head) * HEAD_DIM + columns
    tl.store(target, values.to(tl.bfloat16), mask=mask & is_v)


@triton.jit
def store_float16(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    target = vectors_of(kv, block, STRIDE, tl.float16) + (token * NUM_KV_HEADS + head) * HEAD_DIM + columns
    tl.store(target, values.to(tl.float16), mask=mask & is_v)


@triton.jit
def store_float32(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    target = vectors_of(kv, block, STRIDE, tl.float32) + (token * NUM_KV_HEADS + head) * HEAD_DIM + columns
    tl.store(target, values, mask=mask & is_v)


@triton.jit
def halves(heads):
    """Return the two halves of each row: [rows, 2 * half] -> [rows, half] twice."""
    HALF: tl.constexpr = heads.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(heads, (heads.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def read_one(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HEAD_DIM)[None, :]
    row = (token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head
    vectors = vectors_of(kv, block, STRIDE, like.dtype) + row[:, None] * HEAD_DIM + columns
    if MASKED:
        v = tl.load(vectors, mask=exists[:, None], other=0.0)
    else:
        v = tl.load(vectors)
    # Halves are parted and joined in the dtype of the model: wider ones take twice the shared memory.
    pair = tl.arange(0, HALF)[None, :]
    first, second = halves(v)
    first = (first.to(tl.float32) * tl.load(own[1] + pair).to(tl.float32)).to(like.dtype).to(tl.float32)
    second = (second.to(tl.float32) * tl.load(own[1] + HALF + pair).to(tl.float32)).to(like.dtype).to(tl.float32)
    turned = exists[:, None] & (pair < own[2])
    table = own[0] + positions[:, None] * (2 * own[2]) + pair
    cos = tl.load(table, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(table + own[2], mask=turned, other=0.0).to(tl.float32)
    # Products are rounded before they are added, as in `norm_rope_store`.
    new_first = (first * cos).to(like.dtype).to(tl.float32) - (second * sin).to(like.dtype).to(tl.float32)
    new_second = (second * cos).to(like.dtype).to(tl.float32) + (first * sin).to(like.dtype).to(tl.float32)
    k = tl.permute(tl.join(new_first.to(like.dtype), new_second.to(like.dtype)), (0, 2, 1))
    return tl.reshape(k, (v.shape[0], HEAD_DIM)).T, v
