"""How weights of 2 to 8 bits lie on the device.

The columns of a row are cut into blocks, a block into planes of 64, 32 or 16 neighbouring columns: eight planes of 2
bits, four of 4 or two of 8. A block of a row is as many words of 16 bits as a plane has columns: word j holds column j
of each plane, the first plane in the lowest bits. So a kernel turns a tile of words into the tile of one plane after
the other with a shift and a mask, no value changes its place, and the planes come in the order of the columns. All rows
of a block lie together, then those of the next block.

Codes of e4m3 share the 16 bits of their word in another way: the first has its sign in bit 15 and the rest in bits 4 to
10, as a bfloat16 does, so that a mask makes a number of it. The other bits are those of the second: its sign in bit 11,
three bits of its exponent in bits 12 to 14, the rest in bits 0 to 3.

Of 3 bits there are eight planes, of 5 and 6 bits four, so that a column has more than 16 bits: the others, 4 or 8, lie
in words of their own, in the same order, which two or four neighbouring blocks share.

Scales lie by groups, then by rows, so that a program reads those of its rows from one place. Where a kernel reads them
ahead with its words, they lie in words of 32 bits, which is the least that can be copied so: the scales of two groups,
a scale and its zero, or the exponents of four groups. Two words of a scale and its zero are one of 64 bits. Those of
products in float32 lie as `scale_words` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from nanoinfer.kernels.linear.scale_words import ScaleWords

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What codes of the kind "iq4" stand for."""
_PLANES = (64, 32, 16)
# Group sizes of which any step of a kernel has an even number, if a row has.
_PAIRED = (16, 32, 64, 128)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# By kind and bits: the power of two by which a code's bits, read as a bfloat16, become the code; and the zero's.
_FOLDED = {("int", 4): (129, 3), ("int", 8): (133, 7), ("fp8", 8): (120, 0), ("fp4", 4): (126, 0)}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a weight lies on the device, and what its numbers mean.

    A weight is (code - zero) * scale. The difference is exact; the product is rounded to `product_dtype`, then to
    `result_dtype`, then to the model's dtype. With `scale_words` the product is exact in float32; a minimum is
    subtracted there, if there is one.

    Attributes:
        kind: "int" (codes without a sign, whose zero is half of their number unless there are zeros or minima), "fp8"
            (e4m3), "fp4" (e2m1) or "iq4" (`IQ4_VALUES`).
        bits: of a code, 2 to 6, or 8.
        scale_words: how scales lie whose products are in float32; None: as the rest says.
        factor_columns: columns of a block, if scales count in its factor.
        scale_dtype: float8_e4m3fn for scales that count in a global scale, uint8 for exponents of two (e8m0).
        columns: neighbouring columns that share a scale; None: all columns.
        rows: neighbouring rows that share a scale.
        has_zeros: whether each scale has a zero.
        has_global_scale: whether a float32 factor of each row goes into its scales, in float32.
        divides_global_scale: whether it is a divisor.
        has_group_index: whether a table says for each column which scale it takes.
        product_dtype: None: the scale's.
        result_dtype: the dtype of the reference's matrix; None: the model's.
    """

    kind: str
    bits: int
    scale_dtype: torch.dtype
    columns: int | None
    scale_words: ScaleWords | None = None
    factor_columns: int | None = None
    rows: int = 1
    has_zeros: bool = False
    has_global_scale: bool = False
    divides_global_scale: bool = False
    has_group_index: bool = False
    product_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None

    def num_groups(self, in_features: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.columns is None else -(-in_features // self.columns)

    def plane(self, in_features: int, cut: int | None = None) -> int:
        """Return the columns of a plane: the most that whole blocks of them make up both parts of a sum and a group.

        cut: where sums are cut; None: they are whole.
        """
        part = gcd(in_features, cut or in_features)
        for plane in _PLANES:
            if part % self.block(plane) == 0 and (self.columns is None or self.columns % plane == 0):
                return plane
        return _PLANES[-1]

    def block(self, plane: int) -> int:
        """Return the columns of a block."""
        return plane * self.planes

    @property
    def planes(self) -> int:
        """The planes of a block: 8, 4 or 2."""
        return 8 if self.bits < 4 else 4 if self.bits < 8 else 2

    @property
    def high_bits(self) -> int:
        """The bits of a column of a block beside its word."""
        return self.planes * self.bits - 16

    @property
    def blocks_of_word(self) -> int:
        """The neighbouring blocks whose high bits lie in one word."""
        return 16 // self.high_bits if self.high_bits else 1

    @property
    def zero(self) -> int:
        """Of products in float32, what is subtracted from a code, or from the byte that a table has for it."""
        if self.kind == "iq4":
            return 128
        return 0 if self.scale_words is None or self.scale_words.has_minima else 2 ** (self.bits - 1)

    @property
    def has_exponents(self) -> bool:
        """Whether scales are powers of two, which bfloat16 has, and held as their exponents."""
        return self.scale_dtype == torch.uint8

    @property
    def has_words(self) -> bool:
        """Whether a kernel takes the fast way: 16-bit scales or exponents, products rounded to their dtype."""
        is_plain = self.rows == 1 and not self.has_global_scale and not self.has_group_index
        is_plain &= self.columns is None or self.columns % _PLANES[-1] == 0
        if self.has_exponents:
            return is_plain and self.kind == "fp4" and not self.has_zeros and self.product_dtype == torch.bfloat16
        is_16_bit = self.scale_dtype in _SIXTEEN_BITS and self.product_dtype is None and self.result_dtype is None
        return is_plain and is_16_bit and not (self.has_zeros and (self.bits == 8 or self.kind == "fp4"))

    @property
    def folded(self) -> tuple[int, int]:
        """Return the powers of two by which a kernel multiplies a scale, and a scale for its zero; 0: it does neither.

        The bits of a code, put into a bfloat16, are a number that is a power of two too small. If the power goes into
        the scale, and the zero is a power of two as well, one instruction with one rounding makes a weight of them.
        Other zeros are subtracted from the code, both as such small numbers.
        """
        if not self.has_words or self.scale_dtype == torch.float16:
            return 0, 0
        power, power_of_zero = _FOLDED[self.kind, self.bits]
        return power, 0 if self.has_zeros else power_of_zero

    def can_fold(self, scales: Tensor) -> bool:
        """Whether the products of scales with these powers are numbers, and the scales have all their bits."""
        power, _ = self.folded
        if self.has_exponents:  # 127 is that of 1; the power makes a number with an exponent of the least one, too
            return power > 0 and bool((scales < 127 + 128 - power).all())
        return power > 0 and bool(((scales >= 2.0**-126) & (scales.float() < 2.0 ** (128 - power))).all())

    def table(self, in_features: int) -> str:
        """Return how scales lie.

        "plain": [groups, rows of scales] in their dtype, and zeros likewise, uint8. "exponents": [groups / 4, rows]
        int32, those of four groups in a word. "pairs": [groups / 2, rows] int32,
        two groups in a word; int64 with zeros, each behind its scale. "words": [groups, rows] int32, scale and zero in
        a word. "scale words": [words, rows] int32, see `scale_words`, for the columns of all blocks.
        """
        if self.scale_words is not None:
            return "scale words"
        if not self.has_words or (self.columns is None and not self.has_zeros):
            return "plain"
        if self.has_exponents:
            return "exponents"
        if self.columns is None:
            return "words"
        return "pairs" if self.columns in _PAIRED and in_features % (2 * self.columns) == 0 else "words"
