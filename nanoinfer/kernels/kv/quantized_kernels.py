"""The device functions of quantised KV: codes of keys, of values, then scales of keys, of values; see `quantized`."""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # as in `quantized`, which imports these functions


@triton.jit
def hadamard(heads, SIZE: tl.constexpr):
    """Turn heads, [rows, at least SIZE], as `quantized.hadamard` does: with the same sums in the same order."""
    PART: tl.constexpr = SIZE & -SIZE
    parts = tl.reshape(heads, (heads.shape[0] * heads.shape[1] // PART, PART))
    for bit in tl.static_range(16):
        if (1 << bit) < PART:
            halves = tl.permute(tl.reshape(parts, (parts.shape[0], 2, PART // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            parts = tl.reshape(tl.join(first + second, first - second), (parts.shape[0], PART))
    return tl.reshape(parts * (PART**-0.5), heads.shape)


@triton.jit
def size_of(values):
    """Of NaN it is infinite: a maximum would pass it over, and the scale must tell of it."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def scale_of(largest, most):
    """Return largest / most, rounded up to bfloat16, as float32."""
    bits = tl.math.div_rn(largest, most).to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(values, scale):
    return tl.floor(tl.math.div_rn(values, tl.where(scale > 0, scale, 1.0)) + 0.5)


@triton.jit
def store_eight(codes, scales, columns, values, mask):
    """codes: [rows, 1] where each row's begin; scales: where its scale lies; values: 0 where mask is not."""
    scale = scale_of(tl.max(size_of(values), 1)[:, None], 127.0)
    tl.store(codes + columns, codes_of(values, scale).to(tl.int8), mask=mask)
    tl.store(scales + columns, tl.broadcast_to(scale, values.shape).to(tl.bfloat16), mask=mask & (columns == 0))


@triton.jit
def store_four(codes, scales, columns, values, mask, HEAD_DIM: tl.constexpr):
    """As `store_eight`, with a scale of every GROUP numbers."""
    NUM_GROUPS: tl.constexpr = (values.shape[1] + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = values.shape[1] // NUM_GROUPS  # heads of 16 numbers have one group of 16
    groups = tl.reshape(values, (values.shape[0], NUM_GROUPS, WIDTH))
    scale = scale_of(tl.max(size_of(groups), 2), 7.0)
    number = tl.reshape(codes_of(groups, scale[:, :, None]) + 8, values.shape).to(tl.int32)
    upper = tl.gather(number, tl.minimum(columns + HEAD_DIM // 2, values.shape[1] - 1) + number * 0, 1)
    tl.store(codes + columns, (number | (upper << 4)).to(tl.uint8), mask=mask & (columns < HEAD_DIM // 2))
    group = tl.arange(0, NUM_GROUPS)[None, :]
    # whether a row is stored at all: its first number is
    is_row = tl.sum((mask & (columns == 0)).to(tl.int32), 1)[:, None] > 0
    tl.store(scales + group, scale.to(tl.bfloat16), mask=is_row & (group * WIDTH < HEAD_DIM))


@triton.jit
def read_eight(codes, scale, columns, exists, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """codes: [tokens, 1], where each token's begin; scale: [tokens, 1] float32; columns: [1, BLOCK_D].

    Returns float32, 0 beside heads.
    """
    number = loaded(codes + columns, exists & (columns < HEAD_DIM), MASKED or HEAD_DIM != columns.shape[1])
    return float_of(number.to(tl.uint8, bitcast=True) ^ 128, 128) * scale


@triton.jit
def read_four(codes, scales, columns, exists, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """As `read_eight`; scales: [tokens, 1], where each token's begin."""
    HALF: tl.constexpr = HEAD_DIM // 2
    if HEAD_DIM == columns.shape[1]:  # a power of two: a byte is loaded once, and a scale
        COUNT: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
        pair = loaded(codes + tl.arange(0, HALF)[None, :], exists, MASKED)
        number = tl.permute(tl.join(pair & 15, pair >> 4), (0, 2, 1))
        number = tl.reshape(float_of(number, 8), (pair.shape[0], COUNT, HEAD_DIM // COUNT))
        scale = loaded(scales + tl.arange(0, COUNT)[None, :], exists, MASKED).to(tl.float32)
        return tl.reshape(number * scale[:, :, None], (pair.shape[0], HEAD_DIM))
    else:
        seen = exists & (columns < HEAD_DIM)
        pair = loaded(codes + columns % HALF, seen, True)
        number = float_of(tl.where(columns >= HALF, pair >> 4, pair & 15), 8)
        return number * loaded(scales + columns // GROUP, seen, True).to(tl.float32)


@triton.jit
def float_of(number, ZERO: tl.constexpr):
    """Return number - ZERO of bytes, by the bits of 2**23 + number: an instruction that converts takes eight times as
    long as a sum."""
    bits = number.to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def loaded(pointers, seen, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=seen, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def part_of(kv, block, STRIDE: tl.constexpr):
    return kv + block.to(tl.int64) * STRIDE


@triton.jit
def scales_at(part, at, row, COUNT: tl.constexpr):
    """Where a token's scales for a head begin: `at` bytes behind the part's begin, COUNT of each."""
    return (part + at).to(tl.pointer_type(tl.bfloat16)) + row * COUNT


@triton.jit
def store_8_8(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    row = token * NUM_KV_HEADS + head
    part = part_of(kv, block, STRIDE)
    codes = part.to(tl.pointer_type(tl.int8)) + (tl.where(is_v, ROWS, 0) + row) * HEAD_DIM
    scales = scales_at(part, 2 * ROWS * HEAD_DIM, row, 2) + tl.where(is_v, 1, 0)
    store_eight(codes, scales, columns, values, mask)


@triton.jit
def store_8_4(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    SCALES: tl.constexpr = ROWS * (HEAD_DIM + HEAD_DIM // 2)
    GROUPS: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    row = token * NUM_KV_HEADS + head
    part = part_of(kv, block, STRIDE)
    codes = part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM
    store_eight(codes, scales_at(part, SCALES, row, 1), columns, values, mask & (is_v == 0))
    codes = part + ROWS * HEAD_DIM + row * (HEAD_DIM // 2)
    store_four(codes, scales_at(part, SCALES + 2 * ROWS, row, GROUPS), columns, values, mask & is_v, HEAD_DIM)


@triton.jit
def store_4_4(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    row = tl.where(is_v, ROWS, 0) + token * NUM_KV_HEADS + head
    part = part_of(kv, block, STRIDE)
    scales = scales_at(part, ROWS * HEAD_DIM, row, (HEAD_DIM + GROUP - 1) // GROUP)
    store_four(part + row * (HEAD_DIM // 2), scales, columns, values, mask, HEAD_DIM)


@triton.jit
def read_8_8(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    columns = tl.arange(0, BLOCK_D)[None, :]
    row = ((token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head)[:, None]
    part = part_of(kv, block, STRIDE)
    codes = part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM
    # Both scales as one word: of two bytes a load is not begun ahead.
    scales = loaded((part + 2 * ROWS * HEAD_DIM).to(tl.pointer_type(tl.int32)) + row, exists[:, None], MASKED)
    of_k, of_v = (scales << 16).to(tl.float32, bitcast=True), (scales & -65536).to(tl.float32, bitcast=True)
    k = read_eight(codes, of_k, columns, exists[:, None], HEAD_DIM, MASKED)
    v = read_eight(codes + ROWS * HEAD_DIM, of_v, columns, exists[:, None], HEAD_DIM, MASKED)
    return k.to(like.dtype).T, v.to(like.dtype)


@triton.jit
def read_8_4(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    SCALES: tl.constexpr = ROWS * (HEAD_DIM + HEAD_DIM // 2)
    GROUPS: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    columns = tl.arange(0, BLOCK_D)[None, :]
    row = ((token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head)[:, None]
    part = part_of(kv, block, STRIDE)
    codes = part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM
    scale = loaded(scales_at(part, SCALES, row, 1), exists[:, None], MASKED).to(tl.float32)
    k = read_eight(codes, scale, columns, exists[:, None], HEAD_DIM, MASKED)
    codes = part + ROWS * HEAD_DIM + row * (HEAD_DIM // 2)
    scales = scales_at(part, SCALES + 2 * ROWS, row, GROUPS)
    v = read_four(codes, scales, columns, exists[:, None], HEAD_DIM, MASKED)
    return k.to(like.dtype).T, v.to(like.dtype)


@triton.jit
def read_4_4(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    GROUPS: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    columns = tl.arange(0, BLOCK_D)[None, :]
    row = ((token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head)[:, None]
    part = part_of(kv, block, STRIDE)
    codes, scales = part + row * (HEAD_DIM // 2), scales_at(part, ROWS * HEAD_DIM, row, GROUPS)
    k = read_four(codes, scales, columns, exists[:, None], HEAD_DIM, MASKED)
    codes += ROWS * (HEAD_DIM // 2)
    v = read_four(codes, scales + ROWS * GROUPS, columns, exists[:, None], HEAD_DIM, MASKED)
    return k.to(like.dtype).T, v.to(like.dtype)
