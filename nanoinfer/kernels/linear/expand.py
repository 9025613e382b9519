"""From packed codes to weights, inside kernels, and the kernel that writes rows of a matrix.

`expanded_plane` makes one plane of a tile of words (see `packing`) a tile of weights, in the arithmetic of the
weight's reference and with its roundings, so that a product with it has the bits of the product with the expanded
matrix. Where scales lie in words, it takes the instructions of `instructions`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.linear.instructions import EXPANSIONS, number_of
from nanoinfer.kernels.linear.packing import PackedWeight

INT, FP8, FP4 = (tl.constexpr(number) for number in range(3))
"""Kinds of codes, and of scales that are no numbers of a wider type: exponents of two, or e4m3."""
ROW, PAIRS, WORDS, TABLE, COLUMN = (tl.constexpr(number) for number in range(5))
"""Where a weight's scale is: one for a row; of two groups in a word; with its zero in a word; in a table; in a table,
and another one for each column of a plane."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_KINDS = {"int": INT.value, "fp8": FP8.value, "fp4": FP4.value}
_EXPANSIONS = tl.constexpr(EXPANSIONS)


@triton.jit
def wide(value, EXPANSION: tl.constexpr):
    """8-bit values that were loaded, as int32, in a way that the compiler does not see through.

    It would take them for the operand of a product, and change the order of the columns as it does for operands of 8
    bits. EXPANSION: below -1 there is no compiler.
    """
    value = value.to(tl.int32)
    if EXPANSION == -1:
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
def code_value(words, zero, p: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane p of words, int32, without their zero, as float32."""
    code = words >> BITS * p & (1 << BITS) - 1
    if KIND == INT:
        return (code - zero).to(tl.float32)
    elif KIND == FP8:
        bits = words & 0x87F0 if p == 0 else words << 4 & 0x80F0 | words >> 4 & 0x0700
        return float8_number(bits << 16)
    else:
        bits = (code & 7) << 22 | (code & 8) << 28
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def scale_value(scale, factor, SCALE: tl.constexpr, FACTOR: tl.constexpr, EXPANSION: tl.constexpr):
    """A table's scales as float32. SCALE: -1 for floating-point numbers; FACTOR: 1 is multiplied, 2 divides."""
    if SCALE == INT:
        exponent = wide(scale, EXPANSION)
        value = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    elif SCALE == FP8:
        value = float8_value(wide(scale, EXPANSION))
    else:
        value = scale.to(tl.float32)
    if FACTOR == 1:
        value = value * factor
    elif FACTOR == 2:
        value = tl.div_rn(value, factor)
    return value


@triton.jit
def halves_of_word(
    word,
    half: tl.constexpr,
    EXPANSION: tl.constexpr,
    PRODUCT: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_ZERO: tl.constexpr,
):
    """Return scale and zero that lie in a word; with `half` 1 another scale, and no zero.

    With FOLD, the scale times 2**FOLD, and minus the scale times 2**FOLD_ZERO.
    """
    if FOLD > 0:
        zero_word = (word + (FOLD_ZERO << 7) * 65537) ^ -2147450880  # the signs of both halves
        word += (FOLD << 7) * 65537
        zero = (zero_word >> 16 * half).to(tl.int16).to(PRODUCT, bitcast=True)
        return (word >> 16 * half).to(tl.int16).to(PRODUCT, bitcast=True), zero
    scale = (word >> 16 * half).to(tl.int16).to(PRODUCT, bitcast=True)
    if EXPANSION >= 0:
        zero = (word >> 16).to(tl.int16).to(PRODUCT, bitcast=True)
    else:
        zero = word >> 16 & 127
    return scale, zero


@triton.jit
def scales_of_plane(
    scales, zeros, global_scale, group_index,  # see `PackedWeight`
    of_row,  # with ROW: scale and zero of each row
    row,
    num_rows,
    first,  # the block at which a group begins, or another one
    offset: tl.constexpr,  # of the plane, in columns from the first block
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MODE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, EXPANSION: tl.constexpr, PRODUCT: tl.constexpr,
    FOLD: tl.constexpr, FOLD_ZERO: tl.constexpr,
):  # fmt: skip
    """Return scales and zeros for the weights of a plane, as tiles [rows, PLANE]; the zero may be a number.

    ALIGNED: whether the first block begins with a group. EVEN: whether no plane lies beyond the weight; one
    that does gets the last group's.
    """
    zero = 1 << BITS - 1
    if MODE == COLUMN:
        column = first * BLOCK + offset + tl.arange(0, PLANE)
        if group_index is None:
            group = column // GROUP
        else:
            group = tl.load(group_index + column, mask=column < SIZE, other=0)
        at = group[None, :].to(tl.int64) * tl.cdiv(num_rows, ROWS) + (row // ROWS)[:, None]
        inside = tl.broadcast_to((column < SIZE)[None, :], at.shape)
        factor = 0.0 if global_scale is None else tl.load(global_scale + row)[:, None]
        scale = scale_value(tl.load(scales + at, mask=inside, other=0), factor, SCALE, FACTOR, EXPANSION)
        if ZEROS:
            zero = wide(tl.load(zeros + at, mask=inside, other=0), EXPANSION)
        return scale, zero
    else:
        if MODE == ROW:
            scale, zero = of_row
        elif MODE == PAIRS:
            pair = first * BLOCK // (2 * GROUP) + offset // GROUP // 2
            if not EVEN:
                pair = tl.minimum(pair, (SIZE - 1) // (2 * GROUP))
            word = tl.load(scales + pair * num_rows + row)
            scale, zero = halves_of_word(word, offset // GROUP % 2, EXPANSION, PRODUCT, FOLD, FOLD_ZERO)
        else:
            if ALIGNED:
                group = first * BLOCK // GROUP + offset // GROUP
            else:
                group = (first * BLOCK + offset) // GROUP
            if not EVEN:
                group = tl.minimum(group, (SIZE - 1) // GROUP)
            if MODE == WORDS:
                word = tl.load(scales + group * num_rows + row)
                scale, zero = halves_of_word(word, 0, EXPANSION, PRODUCT, FOLD, FOLD_ZERO)
            else:
                at = group.to(tl.int64) * tl.cdiv(num_rows, ROWS) + row // ROWS
                factor = 0.0 if global_scale is None else tl.load(global_scale + row)
                scale = scale_value(tl.load(scales + at), factor, SCALE, FACTOR, EXPANSION)
                if ZEROS:
                    zero = wide(tl.load(zeros + at), EXPANSION)
        scale = tl.broadcast_to(scale[:, None], [row.shape[0], PLANE])
        if ZEROS or FOLD_ZERO > 0:
            zero = tl.broadcast_to(zero[:, None], [row.shape[0], PLANE])
        else:  # what lies in the word is another scale
            zero = 1 << BITS - 1
        return scale, zero


@triton.jit
def scales_of_rows(
    scales, zeros, global_scale, row, MODE: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, EXPANSION: tl.constexpr, PRODUCT: tl.constexpr, WORD: tl.constexpr,
    FOLD: tl.constexpr, FOLD_ZERO: tl.constexpr,
):  # fmt: skip
    """With ROW: load scale and zero of each row once. WORD: whether they lie in a word."""
    if MODE != ROW:
        return 0, 0
    elif WORD:
        return halves_of_word(tl.load(scales + row), 0, EXPANSION, PRODUCT, FOLD, FOLD_ZERO)
    elif FOLD > 0:
        word = tl.load(scales + row).to(tl.int16, bitcast=True).to(tl.int32)
        return halves_of_word(word, 0, EXPANSION, PRODUCT, FOLD, FOLD_ZERO)
    else:
        scale = tl.load(scales + row // ROWS)
        zero = 0
        if ZEROS:
            zero = wide(tl.load(zeros + row // ROWS), EXPANSION)
        if EXPANSION < 0:
            factor = 0.0 if global_scale is None else tl.load(global_scale + row)
            scale = scale_value(scale, factor, SCALE, FACTOR, EXPANSION)
        return scale, zero


@triton.jit
def expanded_plane(
    words,  # [rows, PLANE] int16
    scales, zeros, global_scale, group_index,  # see `PackedWeight`
    of_row,  # from `scales_of_rows`
    row, num_rows, first,
    offset: tl.constexpr,  # see `scales_of_plane`
    like,  # a pointer to weights
    p: tl.constexpr,  # which plane
    SIZE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    ZEROS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr,
    EXPANSION: tl.constexpr,  # which instructions; -1: those that triton chooses; -2: the interpreter
    FOLD: tl.constexpr, FOLD_ZERO: tl.constexpr,
    PRODUCT: tl.constexpr,  # the dtype of the product
    RESULT: tl.constexpr,  # a dtype that it is rounded to besides
):  # fmt: skip
    """Return the weights of one plane: [rows, PLANE] in the model's dtype."""
    scale, zero = scales_of_plane(
        scales, zeros, global_scale, group_index, of_row, row, num_rows, first, offset, SIZE, BLOCK, PLANE, GROUP,
        ROWS, MODE, ALIGNED, EVEN, ZEROS, KIND, BITS, SCALE, FACTOR, EXPANSION, PRODUCT, FOLD, FOLD_ZERO,
    )  # fmt: skip
    if EXPANSION >= 0:
        # Only float16 products become another dtype, bfloat16, among these instructions.
        dtype: tl.constexpr = tl.bfloat16 if like.dtype.element_ty == tl.bfloat16 else PRODUCT
        if ZEROS or FOLD_ZERO > 0:
            weight = tl.inline_asm_elementwise(
                _EXPANSIONS[EXPANSION][p], "=r,r,r,r", [words, scale, zero], dtype=dtype.value, is_pure=True, pack=2
            )
        else:
            weight = tl.inline_asm_elementwise(
                _EXPANSIONS[EXPANSION][p], "=r,r,r", [words, scale], dtype=dtype.value, is_pure=True, pack=2
            )
    else:
        value = code_value(words.to(tl.int32), zero, p, KIND, BITS).to(PRODUCT)
        # The product of two 16-bit numbers is exact in float32, so it is rounded once.
        weight = (value.to(tl.float32) * scale.to(PRODUCT).to(tl.float32)).to(PRODUCT)
        if RESULT is not None:
            weight = weight.to(RESULT)
    return weight.to(like.dtype.element_ty)


@triton.jit
def beside(left, right):
    """Return two tiles as one, the columns of `right` behind those of `left`. The compiler moves no register."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


def has_instructions(device: torch.device) -> bool:
    """Whether kernels may be made of instructions of a GPU; the interpreter knows none."""
    return device.type == "cuda"


def constants_of(weight: PackedWeight, device: torch.device, dtype: torch.dtype) -> dict:
    """Return what kernels must know of a packing when they are compiled. dtype: the model's."""
    packing, size = weight.packing, weight.in_features
    plane, table = packing.plane(size), packing.table(size)
    block, is_word = packing.block(plane), table == "words"
    if packing.columns is None:
        mode = ROW
    elif packing.has_group_index or packing.columns % plane:
        mode = COLUMN
    else:
        mode = {"pairs": PAIRS, "words": WORDS, "plain": TABLE}[table]
    group = packing.columns or size
    scale_dtype = packing.scale_dtype
    product = packing.product_dtype or (scale_dtype if scale_dtype in _TYPES else torch.float32)
    fits = packing.has_words and has_instructions(device)
    folds = fits and weight.can_fold and dtype == torch.bfloat16 and packing.folded[0] > 0
    number = number_of(packing, dtype, folds) if fits else -1 if has_instructions(device) else -2
    return dict(
        SIZE=size,
        BITS=packing.bits,
        KIND=_KINDS[packing.kind],
        PLANE=plane,
        BLOCK=block,
        GROUP=group,
        ROWS=packing.rows,
        MODE=mode.value,
        WORD=is_word,
        ZEROS=packing.has_zeros,
        SCALE={torch.uint8: INT.value, torch.float8_e4m3fn: FP8.value}.get(scale_dtype, -1),
        FACTOR=0 if not packing.has_global_scale else 2 if packing.divides_global_scale else 1,
        EXPANSION=number,
        FOLD=packing.folded[0] if folds else 0,
        FOLD_ZERO=packing.folded[1] if folds else 0,
        PRODUCT=_TYPES[product],
        RESULT=None if packing.result_dtype is None else _TYPES[packing.result_dtype],
    )


def tensors_of(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Return the arguments of kernels that hold a weight: words, scales, zeros, global_scale, group_index."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    return weight.codes, scales, weight.zeros, weight.global_scale, weight.group_index


@triton.jit(do_not_specialize=["count"])
def expand_kernel(
    words, scales, zeros, global_scale, group_index,
    ids,  # [count], which rows; None: the first ones
    out,  # [count, SIZE]
    num_rows,
    count,
    SIZE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr, WORD: tl.constexpr, ZEROS: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, EXPANSION: tl.constexpr, FOLD: tl.constexpr, FOLD_ZERO: tl.constexpr,
    PRODUCT: tl.constexpr, RESULT: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The buffer may still be read by the kernel before this one.
    wait_for_inputs(PDL)
    let_next_in(PDL)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < count
    row = tl.minimum(place, count - 1)
    if ids is not None:
        row = tl.load(ids + row).to(tl.int32)
    first = tl.program_id(0) * UNROLL
    at = tl.arange(0, PLANE)
    of_row = scales_of_rows(
        scales, zeros, global_scale, row, MODE, ZEROS, SCALE, FACTOR, ROWS, EXPANSION, PRODUCT, WORD, FOLD, FOLD_ZERO
    )  # fmt: skip
    for u in tl.static_range(UNROLL):
        if (first + u) * BLOCK < SIZE:
            start = ((first + u).to(tl.int64) * num_rows + row[:, None]) * PLANE
            tile = tl.load(words + start + at[None, :])
            for p in tl.static_range(16 // BITS):
                weight = expanded_plane(
                    tile, scales, zeros, global_scale, group_index, of_row, row, num_rows, first, u * BLOCK + p * PLANE,
                    out, p, SIZE, BITS, KIND, PLANE, BLOCK, GROUP, ROWS, MODE, (UNROLL * BLOCK) % GROUP == 0,
                    SIZE % BLOCK == 0, ZEROS, SCALE, FACTOR, EXPANSION, FOLD, FOLD_ZERO, PRODUCT, RESULT,
                )  # fmt: skip
                column = (first + u) * BLOCK + p * PLANE + at
                stored = inside[:, None] & (column < SIZE)[None, :]
                tl.store(out + place.to(tl.int64)[:, None] * SIZE + column[None, :], weight, mask=stored)


def expand(weight: PackedWeight, out: Tensor, ids: Tensor | None = None) -> Tensor:
    """Write rows of the matrix, [count, in_features], to `out` in the model's dtype. ids: [count]; None: all rows."""
    count = weight.num_rows if ids is None else len(ids)
    assert out.is_contiguous() and out.shape == (count, weight.in_features), "the matrix is packed"
    if count == 0:
        return out
    constants = constants_of(weight, out.device, out.dtype)
    unroll = first_blocks(constants)
    block_n = 32
    grid = (triton.cdiv(len(weight.codes), unroll), triton.cdiv(count, block_n))
    expand_kernel[grid](
        *tensors_of(weight), ids, out, weight.num_rows, count, **constants, UNROLL=unroll, BLOCK_N=block_n, num_warps=4,
        **launch_options(out),
    )  # fmt: skip
    return out


def first_blocks(constants: dict) -> int:
    """Return how many blocks a program must take at a time: with pairs, whole ones."""
    is_paired = constants["MODE"] == PAIRS.value
    return max(1, 2 * constants["GROUP"] // constants["BLOCK"]) if is_paired else 1
