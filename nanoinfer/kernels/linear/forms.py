"""What kernels that expand packed weights must know of one when they are compiled."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.linear.instructions import number_of
from nanoinfer.kernels.linear.packed_weight import PackedWeight
from nanoinfer.kernels.linear.wide_instructions import positions_of, wide_number_of

INT, FP8, FP4, IQ4 = (tl.constexpr(number) for number in range(4))  # kinds of codes
ROW, PAIRS, WORDS, EXPONENTS, TABLE, COLUMN, SCALE_WORDS = (tl.constexpr(number) for number in range(7))
"""Where a weight's scale is: one for a row; of two groups in a word; of one, with its zero, in a word; its exponent, of
four groups in a word; in a table; in a table, and another one for each column of a plane; in words of their own, for
products in float32."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_MODES = {"pairs": PAIRS, "words": WORDS, "exponents": EXPONENTS, "plain": TABLE, "scale words": SCALE_WORDS}
_OTHERS = ("zeros", "global_scale", "group_index", "high_bits", "factors")
_KINDS = {"int": INT.value, "fp8": FP8.value, "fp4": FP4.value, "iq4": IQ4.value}


class WeightForm(NamedTuple):
    """What kernels must know of a packed weight when they are compiled.

    Attributes:
        size: columns of the weight.
        bits, kind: of a code.
        planes, high_bits, blocks_of_word, zero: see `packing`.
        plane, block, group, rows: columns of each, and rows that share a scale; see `packing`.
        factor: columns that share a factor of their scales; 0: there is none.
        mode: where scales are.
        scale_bits, groups_of_word, has_minima: of scales in words of their own; see `scale_words`.
        has_words, has_zeros: whether scales lie in words; whether each has a zero.
        has_float8_scales: whether scales are e4m3 numbers.
        global_factor: whether a global scale multiplies (1) or divides (2) the scales.
        positions: of codes in those instructions of `wide_instructions`, by plane.
        expansion: which instructions; -1: those that triton chooses; -2: also where it chooses
            others than on a GPU with PTX, as the interpreter does.
        fold, fold_zero: see `Packing.folded`.
        fold_products: whether zeros are multiplied with their scales; see `Folding.zeros`.
        product, result: the dtype of the product, and one that it is rounded to besides, or None.
    """

    size: int
    bits: int
    kind: int
    planes: int
    high_bits: int
    blocks_of_word: int
    zero: int
    plane: int
    block: int
    group: int
    rows: int
    factor: int
    mode: int
    scale_bits: int
    groups_of_word: int
    has_minima: bool
    has_words: bool
    has_zeros: bool
    has_float8_scales: bool
    global_factor: int
    positions: tuple[int, ...] | None
    expansion: int
    fold: int
    fold_zero: int
    fold_products: bool
    product: tl.dtype
    result: tl.dtype | None


def form_of(weight: PackedWeight, device: torch.device, dtype: torch.dtype) -> WeightForm:
    """Return what kernels that run on a device must know of a weight. dtype: the model's."""
    packing, size = weight.packing, weight.in_features
    plane, table = packing.plane(size, weight.cut), packing.table(size)
    if packing.columns is None:
        mode = ROW
    elif packing.has_group_index or packing.columns % plane:
        mode = COLUMN
    else:
        mode = _MODES[table]
    scale_dtype, words = packing.scale_dtype, packing.scale_words
    product = packing.product_dtype or (scale_dtype if scale_dtype in _TYPES else torch.float32)
    has_instructions = target_of(device).has_instructions
    fits = packing.has_words and has_instructions
    folds = fits and weight.folding.scales and dtype == torch.bfloat16 and packing.folded[0] > 0
    fold_products = folds and packing.has_zeros and weight.folding.zeros
    number = number_of(packing, dtype, folds, fold_products) if fits else -1
    if words is not None and weight.folding.scales:
        number = wide_number_of(packing, dtype)
    if not has_instructions:
        number = -2
    return WeightForm(
        size=size,
        bits=packing.bits,
        kind=_KINDS[packing.kind],
        planes=packing.planes,
        high_bits=packing.high_bits,
        blocks_of_word=packing.blocks_of_word,
        zero=packing.zero,
        plane=plane,
        block=packing.block(plane),
        group=packing.columns or size,
        rows=packing.rows,
        factor=packing.factor_columns or 0,
        mode=mode.value,
        scale_bits=0 if words is None else words.bits,
        groups_of_word=1 if words is None else words.groups,
        has_minima=words is not None and words.has_minima,
        has_words=table == "words",
        has_zeros=packing.has_zeros,
        has_float8_scales=scale_dtype == torch.float8_e4m3fn,
        global_factor=0 if not packing.has_global_scale else 2 if packing.divides_global_scale else 1,
        positions=positions_of(packing),
        expansion=number,
        fold=packing.folded[0] if folds else 0,
        fold_zero=packing.folded[1] if folds else 0,
        fold_products=fold_products,
        product=_TYPES[product],
        result=None if packing.result_dtype is None else _TYPES[packing.result_dtype],
    )


def tensors_of(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Return the arguments of kernels that hold a weight: words and the other tensors of `PackedWeight`."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    return weight.codes, scales, *(getattr(weight, name) for name in _OTHERS)


def first_blocks(form: WeightForm) -> int:
    """Return how many blocks a program must take at a time: with pairs, whole ones."""
    return max(1, 2 * form.group // form.block) if form.mode == PAIRS.value else 1
