"""The device functions of plain KV: a part of a block is [2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]."""

import triton
import triton.language as tl


@triton.jit
def address_of(kv, block, row, STRIDE: tl.constexpr, ROW: tl.constexpr):
    """Where a row of ROW values begins, counted in its block. int64: a pool holds more than 2^31 values."""
    if STRIDE % ROW == 0:
        return kv + (block * (STRIDE // ROW) + row).to(tl.int64) * ROW
    else:
        return kv + block.to(tl.int64) * STRIDE + row * ROW


@triton.jit
def store_plain(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.where(is_v, BLOCK_SIZE, 0) + token
    if kv.dtype.element_ty.primitive_bitwidth == 8:  # float8 has no infinity
        values = tl.clamp(values, -448.0, 448.0)
    target = address_of(kv, block, row, STRIDE, NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(target + columns, values.to(kv.dtype.element_ty), mask=mask)


@triton.jit
def read_plain(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    if TMA:
        row = block * (STRIDE // ROW) + token
        k_t = kv_rows.load([row + start, head * HEAD_DIM]).T
        v = kv_rows.load([row + BLOCK_SIZE + start, head * HEAD_DIM]).to(like.dtype)
        if MASKED:
            v = tl.where(exists[:, None], v, 0.0)
    else:
        columns = tl.arange(0, BLOCK_D)
        in_head = columns < HEAD_DIM
        address = (start + tl.arange(0, exists.shape[0])) * ROW
        k_head = address_of(kv, block, token, STRIDE, ROW) + head * HEAD_DIM
        k_pointers = k_head + address[None, :] + columns[:, None]
        v_pointers = k_head + BLOCK_SIZE * ROW + address[:, None] + columns[None, :]
        if MASKED:
            k_t = tl.load(k_pointers, mask=exists[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_pointers, mask=exists[:, None] & in_head[None, :], other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k_t = tl.load(k_pointers, mask=in_head[:, None], other=0.0)
            v = tl.load(v_pointers, mask=in_head[None, :], other=0.0)
        else:
            k_t = tl.load(k_pointers)
            v = tl.load(v_pointers)
        v = v.to(like.dtype)
    return k_t.to(like.dtype), v
