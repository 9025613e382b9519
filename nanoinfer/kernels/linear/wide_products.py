"""Weights whose products of scale and code are in float32 (see `scale_words`), inside kernels.

A product is exact, so it and the minimum that is subtracted from it may be one instruction; their sum is rounded, and
then the weight to the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.linear.forms import IQ4, SCALE_WORDS
from nanoinfer.kernels.linear.wide_instructions import IQ4_BYTES, WIDE_EXPANSIONS

_WIDE_EXPANSIONS = tl.constexpr(WIDE_EXPANSIONS)

# Of the first eight codes of the kind "iq4", and of the others.
_IQ4_LOW, _IQ4_HIGH = (
    tl.constexpr(int.from_bytes(some, "little", signed=True)) for some in (IQ4_BYTES[:8], IQ4_BYTES[8:])
)


@triton.jit
def high_words(high_bits, block, row, num_rows, FORM: tl.constexpr):
    """Load the words that hold the high bits of a block, and of those that share them."""
    if high_bits is None:
        return 0
    else:
        start = (block // FORM.blocks_of_word).to(tl.int64) * num_rows + row[:, None]
        return tl.load(high_bits + start * FORM.plane + tl.arange(0, FORM.plane)[None, :])


@triton.jit
def with_high_bits(words, high, number, FORM: tl.constexpr):
    """Return the words of a block as they are, or in 32 bits with the other bits of their columns above them.

    number: of the block among those that share `high`. Where it is no constant, the weights take a way through shared
    memory: the compiler moves no tile that a number was made into.
    """
    if FORM.high_bits == 0:
        return words
    else:
        return words.to(tl.int32) & 0xFFFF | high.to(tl.int32) >> number * FORM.high_bits << 16


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
def raised(value, POWER: tl.constexpr):
    """value * 2**POWER, which itself may be infinite in float32."""
    if POWER > 127:
        value = value * 2.0**64 * 2.0 ** (POWER - 64)
    elif POWER != 0:
        value = value * 2.0**POWER
    return value


@triton.jit
def wide_scale(of_block, offset: tl.constexpr, FORM: tl.constexpr, POWER: tl.constexpr):
    """Return the scale of each row times 2**POWER, and its minimum or 0.

    offset: of the plane, in columns from its block.
    """
    SPAN: tl.constexpr = FORM.group * FORM.groups_of_word
    factor = of_block[0]
    word = of_block[1 + offset // SPAN]
    BITS: tl.constexpr = FORM.scale_bits
    word = word >> offset % SPAN // FORM.group * (32 // FORM.groups_of_word)
    if BITS == 16:
        scale = raised(half_value(word), POWER)
        if FORM.has_minima:
            return scale, half_value(word >> 16)
        else:
            return scale, 0.0
    elif FORM.has_minima:
        scale = (word & (1 << BITS) - 1).to(tl.float32) * raised(half_value(factor), POWER)
        return scale, (word >> BITS & (1 << BITS) - 1).to(tl.float32) * half_value(factor >> 16)
    else:
        return (word << 24 >> 24).to(tl.float32) * raised(factor.to(tl.float32, bitcast=True), POWER), 0.0


@triton.jit
def wide_code(words, p: tl.constexpr, FORM: tl.constexpr):
    """The codes of plane p of words, int32, without their zero, as float32."""
    code = words >> FORM.bits * p & (1 << FORM.bits) - 1
    if FORM.kind == IQ4:
        table = tl.where(code & 8 != 0, tl.full([], _IQ4_HIGH, tl.int64), tl.full([], _IQ4_LOW, tl.int64))
        code = (table >> ((code & 7) * 8).to(tl.int64)).to(tl.int32) & 255
    return (code - FORM.zero).to(tl.float32)


@triton.jit
def wide_plane(words, of_block, offset: tl.constexpr, like, p: tl.constexpr, FORM: tl.constexpr):
    """Return the weights of plane p of a block, [rows, plane] in the model's dtype. offset: see `wide_scale`."""
    if FORM.expansion >= 0:
        return expanded_wide_plane(words, of_block, offset, like, p, FORM)
    else:
        scale, minimum = wide_scale(of_block, offset, FORM, 0)
        weight = wide_code(words.to(tl.int32), p, FORM) * scale[:, None]
        if FORM.has_minima:
            weight -= minimum[:, None]
        return weight.to(like.dtype.element_ty)


@triton.jit
def expanded_wide_plane(words, of_block, offset: tl.constexpr, like, p: tl.constexpr, FORM: tl.constexpr):
    """As `wide_plane`, with the instructions of `wide_instructions`."""
    POSITION: tl.constexpr = FORM.positions[p]
    scale, minimum = wide_scale(of_block, offset, FORM, 149 - POSITION)
    if FORM.has_minima:
        added = -minimum
    else:
        added = scale * (-FORM.zero * 2.0 ** (POSITION - 149))
    scale = tl.broadcast_to(scale[:, None], words.shape)
    added = tl.broadcast_to(added[:, None], words.shape)
    code: tl.constexpr = _WIDE_EXPANSIONS[FORM.expansion][p]
    REGISTERS: tl.constexpr = "=r,r,f,f,f,f" if FORM.high_bits == 0 else "=r,r,r,f,f,f,f"
    dtype: tl.constexpr = like.dtype.element_ty
    return tl.inline_asm_elementwise(code, REGISTERS, [words, scale, added], dtype=dtype.value, is_pure=True, pack=2)
