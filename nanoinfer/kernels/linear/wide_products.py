"""Weights whose products of scale and code are in float32 (see `scale_words`), inside kernels.

A product is exact, so it and the minimum that is subtracted from it may be one instruction; their sum is rounded, and
then the weight to the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.linear.forms import IQ4, SCALE_WORDS
from nanoinfer.kernels.linear.packing import IQ4_VALUES

# A byte for each code of the kind "iq4", 128 above its value; of the first eight codes, and of the others.
_IQ4_LOW, _IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(value + 128 for value in some), "little", signed=True))
    for some in (IQ4_VALUES[:8], IQ4_VALUES[8:])
)


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
def with_high_bits(words, high_bits, block, row, num_rows, FORM: tl.constexpr):
    """Return the words of a block as they are, or in 32 bits with the high bits of their codes above them."""
    if high_bits is None:
        return words
    else:
        SHARED: tl.constexpr = FORM.blocks_of_byte
        start = (block // SHARED).to(tl.int64) * num_rows + row[:, None]
        fields = wide(tl.load(high_bits + start * FORM.plane + tl.arange(0, FORM.plane)[None, :]), FORM)
        if SHARED == 2:
            fields = fields >> block % 2 * 4
        return words.to(tl.int32) & 0xFFFF | fields << 16


@triton.jit
def scales_of_block(scales, factors, of_row, row, num_rows, block, FORM: tl.constexpr):
    """Load what `wide_plane` takes for the planes of a block: the factor, and four words, or fewer and any others.

    For weights of other kinds what `scales_of_rows` has returned is returned.
    """
    if FORM.mode != SCALE_WORDS:
        return of_row
    else:
        SPAN: tl.constexpr = FORM.group * FORM.groups_of_word
        first = block * FORM.block // SPAN * num_rows + row
        word = tl.load(scales + first)
        second = word
        third = word
        fourth = word
        if FORM.block // SPAN > 1:
            second = tl.load(scales + first + num_rows)
        if FORM.block // SPAN > 2:
            third = tl.load(scales + first + 2 * num_rows)
            fourth = tl.load(scales + first + 3 * num_rows)
        factor = word
        if factors is not None:
            factor = tl.load(factors + block * FORM.block // FORM.factor * num_rows + row)
        if FORM.block < SPAN:  # a part of a word
            word = word >> block * FORM.block % SPAN // FORM.group * (32 // FORM.groups_of_word)
        return factor, word, second, third, fourth


@triton.jit
def half_value(bits):
    """The lower 16 bits of an int32 are a float16 number: as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def wide_scale(of_block, offset: tl.constexpr, FORM: tl.constexpr):
    """Return the scale of each row, and its minimum or 0. offset: of the plane, in columns from its block."""
    SPAN: tl.constexpr = FORM.group * FORM.groups_of_word
    factor = of_block[0]
    word = of_block[1 + offset // SPAN]
    BITS: tl.constexpr = FORM.scale_bits
    WIDTH: tl.constexpr = 32 // FORM.groups_of_word
    SHIFT: tl.constexpr = offset % SPAN // FORM.group * WIDTH
    word = word >> SHIFT
    if BITS == 16:
        if FORM.has_minima:
            return half_value(word), half_value(word >> 16)
        else:
            return half_value(word), 0.0
    elif FORM.has_minima:
        scale = (word & (1 << BITS) - 1).to(tl.float32) * half_value(factor)
        return scale, (word >> BITS & (1 << BITS) - 1).to(tl.float32) * half_value(factor >> 16)
    else:
        return (word << 24 >> 24).to(tl.float32) * factor.to(tl.float32, bitcast=True), 0.0


@triton.jit
def wide_code(words, p: tl.constexpr, FORM: tl.constexpr):
    """The codes of plane p of words, int32, without their zero, as float32."""
    code = words >> FORM.bits * p & (1 << FORM.bits) - 1
    if FORM.high_bits > 0:
        code |= (words >> 16 + FORM.high_bits * p & (1 << FORM.high_bits) - 1) << FORM.bits
    if FORM.kind == IQ4:
        table = tl.where(code & 8 != 0, tl.full([], _IQ4_HIGH, tl.int64), tl.full([], _IQ4_LOW, tl.int64))
        code = (table >> ((code & 7) * 8).to(tl.int64)).to(tl.int32) & 255
    return (code - FORM.zero).to(tl.float32)


@triton.jit
def wide_plane(words, of_block, offset: tl.constexpr, p: tl.constexpr, FORM: tl.constexpr):
    """Return the weights of plane p of a block, [rows, plane] float32. offset: see `wide_scale`."""
    scale, minimum = wide_scale(of_block, offset, FORM)
    weight = wide_code(words.to(tl.int32), p, FORM) * scale[:, None]
    if FORM.has_minima:
        weight -= minimum[:, None]
    return weight
