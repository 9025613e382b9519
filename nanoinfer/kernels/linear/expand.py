"""From packed codes to weights, inside kernels, and the kernel that writes rows of a matrix.

`expanded_plane` makes one plane of a tile of words (see `packing`) a tile of weights, in the arithmetic of the
weight's reference and with its roundings, so that a product with it has the bits of the product with the expanded
matrix. Where scales lie in words, it takes the instructions of `instructions`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.linear.forms import (
    COLUMN,
    EXPONENTS,
    FP8,
    INT,
    PAIRS,
    ROW,
    SCALE_WORDS,
    WORDS,
    first_blocks,
    form_of,
    tensors_of,
)
from nanoinfer.kernels.linear.instructions import EXPANSIONS, PAIR_OF_BYTES, PRODUCT_OF_HALVES
from nanoinfer.kernels.linear.packed_weight import PackedWeight
from nanoinfer.kernels.linear.wide_products import high_words, scales_of_block, wide_plane, with_high_bits

_EXPANSIONS = tl.constexpr(EXPANSIONS)
_PRODUCT_OF_HALVES, _PAIR_OF_BYTES = tl.constexpr(PRODUCT_OF_HALVES), tl.constexpr(PAIR_OF_BYTES)


@triton.jit
def wide(value, FORM: tl.constexpr):
    """8-bit values that were loaded, as int32, in a way that the compiler does not see through.

    It would take them for the operand of a product, and change the order of the columns as it does for operands of 8
    bits.
    """
    value = value.to(tl.int32)
    if FORM.expansion == -1:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def float8_number(bits):
    """e4m3 codes whose bits lie where float32 has them, int32, as float32."""
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: the exponents' biases differ


@triton.jit
def float8_value(code):
    """e4m3 codes, int32, as float32."""
    return float8_number((code & 0x7F) << 20 | (code & 0x80) << 24)


@triton.jit
def code_value(words, zero, p: tl.constexpr, FORM: tl.constexpr):
    """The codes of plane p of words, int32, without their zero, as float32."""
    code = words >> FORM.bits * p & (1 << FORM.bits) - 1
    if FORM.kind == INT:
        return (code - zero).to(tl.float32)
    elif FORM.kind == FP8:
        bits = words & 0x87F0 if p == 0 else words << 4 & 0x80F0 | words >> 4 & 0x0700
        return float8_number(bits << 16)
    else:
        bits = (code & 7) << 22 | (code & 8) << 28
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def scale_value(scale, factor, FORM: tl.constexpr):
    """A table's scales as float32."""
    if FORM.has_float8_scales:
        value = float8_value(wide(scale, FORM))
    else:
        value = scale.to(tl.float32)
    if FORM.global_factor == 1:
        value = value * factor
    elif FORM.global_factor == 2:
        value = tl.div_rn(value, factor)
    return value


@triton.jit
def halves_of_word(word, half: tl.constexpr, FORM: tl.constexpr):
    """Return scale and zero that lie in a word; with `half` 1 another scale, and no zero.

    Folded, the scale times 2**fold, and minus the zero times the scale: the scale times 2**fold_zero, or the product of
    what lies in the word. Where that would be rounded, what lies there: see `packing`.
    """
    if FORM.fold > 0 and not FORM.has_zeros:
        zero_word = (word + (FORM.fold_zero << 7) * 65537) ^ -2147450880  # the signs of both halves
        word += (FORM.fold << 7) * 65537
        zero = (zero_word >> 16 * half).to(tl.int16).to(FORM.product, bitcast=True)
        return (word >> 16 * half).to(tl.int16).to(FORM.product, bitcast=True), zero
    else:
        scale = (word + (FORM.fold << 7) >> 16 * half).to(tl.int16).to(FORM.product, bitcast=True)
        bits = word >> 16
        if FORM.expansion < 0:
            return scale, bits >> (4 if FORM.product == tl.bfloat16 else 0) & 15
        elif FORM.fold_products:
            word += FORM.fold << 7
            return scale, tl.inline_asm_elementwise(
                _PRODUCT_OF_HALVES, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
            ).to(tl.int16).to(FORM.product, bitcast=True)
        else:
            if FORM.product == tl.bfloat16 and FORM.fold == 0:
                bits = bits >> 4 & 15 | -0x3D00  # minus (128 + zero)
            return scale, bits.to(tl.int16).to(FORM.product, bitcast=True)


@triton.jit
def pair_of_exponents(word, is_second, FORM: tl.constexpr):
    """Return two powers of two as a word of PAIRS. word: four exponents; is_second: 0 for the lower two, or 1."""
    if FORM.expansion >= 0:
        chosen = 0x1404 + is_second * 0x2020  # bytes 0 and 1, or 2 and 3, each above a byte of zeros
        pair = tl.inline_asm_elementwise(_PAIR_OF_BYTES, "=r,r,r", [word, chosen], dtype=tl.int32, is_pure=True, pack=1)
    else:
        both = word >> is_second * 16
        pair = both << 7 & 0x7F80 | both << 15 & 0x7F800000
    if FORM.fold == 0:  # the least power has no exponent in a bfloat16
        pair |= tl.where((pair & 0xFFFF) == 0, 0x40, 0) | tl.where((pair & 0x7FFF0000) == 0, 0x400000, 0)
    return pair


@triton.jit
def scales_of_plane(
    scales, zeros, global_scale, group_index,  # see `PackedWeight`
    of_row,  # with ROW: scale and zero of each row
    row,
    num_rows,
    first,  # the block at which a group begins, or another one
    offset: tl.constexpr,  # of the plane, in columns from the first block
    FORM: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return scales and zeros for the weights of a plane, as tiles [rows, plane]; the zero may be a number.

    ALIGNED: whether the first block begins with a group. EVEN: whether no plane lies beyond the weight; one
    that does gets the last group's.
    """
    zero = 1 << FORM.bits - 1
    if FORM.mode == COLUMN:
        column = first * FORM.block + offset + tl.arange(0, FORM.plane)
        if group_index is None:
            group = column // FORM.group
        else:
            group = tl.load(group_index + column, mask=column < FORM.size, other=0)
        at = group[None, :].to(tl.int64) * tl.cdiv(num_rows, FORM.rows) + (row // FORM.rows)[:, None]
        inside = tl.broadcast_to((column < FORM.size)[None, :], at.shape)
        factor = 0.0 if global_scale is None else tl.load(global_scale + row)[:, None]
        scale = scale_value(tl.load(scales + at, mask=inside, other=0), factor, FORM)
        if FORM.has_zeros:
            zero = wide(tl.load(zeros + at, mask=inside, other=0), FORM)
        return scale, zero
    else:
        if FORM.mode == ROW:
            scale, zero = of_row
        elif FORM.mode == PAIRS:
            pair = first * FORM.block // (2 * FORM.group) + offset // FORM.group // 2
            if not EVEN:
                pair = tl.minimum(pair, (FORM.size - 1) // (2 * FORM.group))
            word = tl.load(scales + pair * num_rows + row)
            half: tl.constexpr = offset // FORM.group % 2
            if FORM.has_zeros:
                scale, zero = halves_of_word((word >> 32 * half).to(tl.int32), 0, FORM)
            else:
                scale, zero = halves_of_word(word, half, FORM)
        elif FORM.mode == EXPONENTS:
            block = first + offset // FORM.block  # which has one word, or half of one
            if not EVEN:
                block = tl.minimum(block, (FORM.size - 1) // FORM.block)
            both = tl.load(scales + block * FORM.block // (4 * FORM.group) * num_rows + row)
            is_second = (block * FORM.block + offset % FORM.block) // (2 * FORM.group) % 2
            scale, zero = halves_of_word(pair_of_exponents(both, is_second, FORM), offset // FORM.group % 2, FORM)
        else:
            if ALIGNED:
                group = first * FORM.block // FORM.group + offset // FORM.group
            else:
                group = (first * FORM.block + offset) // FORM.group
            if not EVEN:
                group = tl.minimum(group, (FORM.size - 1) // FORM.group)
            if FORM.mode == WORDS:
                scale, zero = halves_of_word(tl.load(scales + group * num_rows + row), 0, FORM)
            else:
                at = group.to(tl.int64) * tl.cdiv(num_rows, FORM.rows) + row // FORM.rows
                factor = 0.0 if global_scale is None else tl.load(global_scale + row)
                scale = scale_value(tl.load(scales + at), factor, FORM)
                if FORM.has_zeros:
                    zero = wide(tl.load(zeros + at), FORM)
        scale = tl.broadcast_to(scale[:, None], [row.shape[0], FORM.plane])
        if FORM.has_zeros or FORM.fold_zero > 0:
            zero = tl.broadcast_to(zero[:, None], [row.shape[0], FORM.plane])
        else:  # what lies in the word is another scale
            zero = 1 << FORM.bits - 1
        return scale, zero


@triton.jit
def scales_of_rows(scales, zeros, global_scale, row, FORM: tl.constexpr):
    """Load scale and zero of each row once, if rows have only one."""
    if FORM.mode != ROW:
        return 0, 0
    elif FORM.has_words:
        return halves_of_word(tl.load(scales + row), 0, FORM)
    elif FORM.fold > 0:
        return halves_of_word(tl.load(scales + row).to(tl.int16, bitcast=True).to(tl.int32), 0, FORM)
    else:
        scale = tl.load(scales + row // FORM.rows)
        zero = 0
        if FORM.has_zeros:
            zero = wide(tl.load(zeros + row // FORM.rows), FORM)
        if FORM.expansion < 0:
            factor = 0.0 if global_scale is None else tl.load(global_scale + row)
            scale = scale_value(scale, factor, FORM)
        return scale, zero


@triton.jit
def expanded_plane(
    words,  # [rows, plane], from `with_high_bits`
    scales, zeros, global_scale, group_index,  # see `PackedWeight`
    of_row,  # from `scales_of_rows`, by way of `scales_of_block`
    row, num_rows, first,
    offset: tl.constexpr,  # see `scales_of_plane`
    like,  # a pointer to weights
    p: tl.constexpr,  # which plane
    FORM: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the weights of one plane: [rows, plane] in the model's dtype."""
    if FORM.mode == SCALE_WORDS:
        return wide_plane(words, of_row, offset % FORM.block, like, p, FORM)
    else:
        scale, zero = scales_of_plane(
            scales, zeros, global_scale, group_index, of_row, row, num_rows, first, offset, FORM, ALIGNED, EVEN
        )
        if FORM.expansion >= 0:
            # Only float16 products become another dtype, bfloat16, among these instructions.
            dtype: tl.constexpr = tl.bfloat16 if like.dtype.element_ty == tl.bfloat16 else FORM.product
            code: tl.constexpr = _EXPANSIONS[FORM.expansion][p]
            if FORM.has_zeros or FORM.fold_zero > 0:
                weight = tl.inline_asm_elementwise(
                    code, "=r,r,r,r", [words, scale, zero], dtype=dtype.value, is_pure=True, pack=2
                )
            else:
                weight = tl.inline_asm_elementwise(
                    code, "=r,r,r", [words, scale], dtype=dtype.value, is_pure=True, pack=2
                )
        else:
            value = code_value(words.to(tl.int32), zero, p, FORM).to(FORM.product)
            # The product of two 16-bit numbers is exact in float32, so it is rounded once.
            weight = (value.to(tl.float32) * scale.to(FORM.product).to(tl.float32)).to(FORM.product)
            if FORM.result is not None:
                weight = weight.to(FORM.result)
        return weight.to(like.dtype.element_ty)


@triton.jit
def beside(left, right):
    """Return two tiles as one, the columns of `right` behind those of `left`. The compiler moves no register."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@triton.jit(do_not_specialize=["count"])
def expand_kernel(
    words, scales, zeros, global_scale, group_index, high_bits, factors,
    ids,  # [count], which rows; None: the first ones
    out,  # [count, SIZE]
    num_rows,
    count,
    FORM: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The buffer may still be read by the kernel before this one.
    wait_for_inputs(PDL)
    let_next_in(PDL)
    SIZE: tl.constexpr = FORM.size
    BLOCK: tl.constexpr = FORM.block
    PLANE: tl.constexpr = FORM.plane
    PLANES: tl.constexpr = FORM.planes
    index = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = index < count
    row = tl.minimum(index, count - 1)
    if ids is not None:
        row = tl.load(ids + row).to(tl.int32)
    first = tl.program_id(0) * UNROLL
    at = tl.arange(0, PLANE)
    of_row = scales_of_rows(scales, zeros, global_scale, row, FORM)
    for u in tl.static_range(UNROLL):
        if (first + u) * BLOCK < SIZE:
            start = ((first + u).to(tl.int64) * num_rows + row[:, None]) * PLANE
            high = high_words(high_bits, first + u, row, num_rows, FORM)
            tile = with_high_bits(tl.load(words + start + at[None, :]), high, (first + u) % FORM.blocks_of_word, FORM)
            held = scales_of_block(scales, factors, of_row, row, num_rows, first + u, FORM)
            for p in tl.static_range(PLANES):
                weight = expanded_plane(
                    tile, scales, zeros, global_scale, group_index, held, row, num_rows, first, u * BLOCK + p * PLANE,
                    out, p, FORM, (UNROLL * BLOCK) % FORM.group == 0, SIZE % BLOCK == 0,
                )  # fmt: skip
                column = (first + u) * BLOCK + p * PLANE + at
                stored = inside[:, None] & (column < SIZE)[None, :]
                tl.store(out + index.to(tl.int64)[:, None] * SIZE + column[None, :], weight, mask=stored)


def expand(weight: PackedWeight, out: Tensor, ids: Tensor | None = None) -> Tensor:
    """Write rows of the matrix, [count, in_features], to `out` in the model's dtype. ids: [count]; None: all rows."""
    count = weight.num_rows if ids is None else len(ids)
    assert out.is_contiguous() and out.shape == (count, weight.in_features), "the matrix is packed"
    if count == 0:
        return out
    form = form_of(weight, out.device, out.dtype)
    if form.mode == SCALE_WORDS.value:  # the instructions have another sign of 0, as no product and sum has
        form = form._replace(expansion=min(form.expansion, -1))
    unroll = first_blocks(form)
    block_n = 32
    grid = (triton.cdiv(len(weight.codes), unroll), triton.cdiv(count, block_n))
    expand_kernel[grid](
        *tensors_of(weight), ids, out, weight.num_rows, count, FORM=form, UNROLL=unroll, BLOCK_N=block_n, num_warps=4,
        **launch_options(out),
    )  # fmt: skip
    return out
