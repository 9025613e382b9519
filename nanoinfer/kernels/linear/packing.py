"""How weights of 4 or 8 bits lie on the device.

The columns of a row are cut into blocks, a block into planes of 64, 32 or 16 neighbouring columns: four planes of 4
bits or two of 8. A block of a row is as many words of 16 bits as a plane has columns: word j holds column j of each
plane, the first plane in the lowest bits. So a kernel turns a tile of words into the tile of one plane after the other
with a shift and a mask, no value changes its place, and the planes come in the order of the columns. All rows of a
block lie together, then those of the next block.

Codes of e4m3 share the 16 bits of their word in another way: the first has its sign in bit 15 and the rest in bits 4 to
10, as a bfloat16 does, so that a mask makes a number of it. The other bits are those of the second: its sign in bit 11,
three bits of its exponent in bits 12 to 14, the rest in bits 0 to 3.

Scales lie by groups, then by rows, so that a program reads those of its rows from one place. Where a kernel reads them
ahead with its words, they lie in words of 32 bits, which is the least that can be copied so: the scales of two groups,
a scale and its zero, or the exponents of four groups. Two words of a scale and its zero are one of 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanoinfer.kernels.linear.counts import num_parts

_PLANES = (64, 32, 16)
# Group sizes of which any step of a kernel has an even number, if a part of a sum has.
_PAIRED = (16, 32, 64, 128)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# What a kernel adds to a code for its zero, by the scales' dtype: bits beside the zero, and where its lowest bit is.
# In bfloat16 minus the zero times 2**-129, in float16 minus (1024 + zero). See `instructions`.
_MINUS_ZERO = {torch.bfloat16: (0x8000, 4), torch.float16: (0xE400, 0)}
# By kind and bits: the power of two that makes a code of its bits in a bfloat16, and the one that is the zero.
_FOLDED = {("int", 4): (129, 3), ("int", 8): (133, 7), ("fp8", 8): (120, 0), ("fp4", 4): (126, 0)}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a weight lies on the device, and what its numbers mean.

    A weight is (code - zero) * scale. The difference is exact; the product is rounded to `product_dtype`, then to
    `result_dtype`, then to the model's dtype.

    Attributes:
        kind: "int" (codes without a sign, whose zero is `2**(bits - 1)` unless there are zeros), "fp8" (e4m3) or "fp4"
            (e2m1).
        bits: of a code, 4 or 8.
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

    def plane(self, in_features: int) -> int:
        """Return the columns of a plane: the most that whole blocks of them make up a part of a sum and a group."""
        part = in_features // num_parts(in_features)
        for plane in _PLANES:
            if part % self.block(plane) == 0 and (self.columns is None or self.columns % plane == 0):
                return plane
        return _PLANES[-1]

    def block(self, plane: int) -> int:
        """Return the columns of a block."""
        return plane * 16 // self.bits

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
        a word.
        """
        if not self.has_words or (self.columns is None and not self.has_zeros):
            return "plain"
        if self.has_exponents:
            return "exponents"
        if self.columns is None:
            return "words"
        part = in_features // num_parts(in_features)
        return "pairs" if self.columns in _PAIRED and part % (2 * self.columns) == 0 else "words"


@dataclass
class Folding:
    """What the scales and zeros that were put into a weight allow; weights that one kernel multiplies share it.

    Attributes:
        scales: whether all scales can be folded; see `Packing.can_fold`.
        zeros: whether the product of every zero with its scale is a bfloat16, so that it needs no rounding.
    """

    scales: bool = True
    zeros: bool = True


@dataclass
class PackedWeight:
    """The tensors of a weight, [num_rows, in_features]; or of several, stacked along dimensions before these.

    Attributes:
        codes: [blocks, num_rows, plane] int16.
        scales: see `Packing.table`.
        zeros: likewise, uint8; None: none, or in the words.
        global_scale: [num_rows] float32; None: none.
        group_index: [in_features] int32; None: none.
        folding: what was put in allows.
    """

    packing: Packing
    num_rows: int
    in_features: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: Tensor | None = None
    group_index: Tensor | None = None
    folding: Folding = field(default_factory=Folding)

    @property
    def stacked(self) -> torch.Size:
        """The dimensions along which weights are stacked; (): it is one."""
        return self.codes.shape[:-3]

    def of(self, number: int) -> PackedWeight:
        """Return one of several weights that are stacked along one dimension."""
        tensors = {name: one[number] for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **tensors)

    def put_codes(self, begin: int, codes: Tensor) -> None:
        """Write rows from `begin` on: [n, in_features] uint8."""
        bits, (blocks, _, plane) = self.packing.bits, self.codes.shape[-3:]
        padding = blocks * self.packing.block(plane) - self.in_features
        codes = torch.nn.functional.pad(codes, (0, padding)) if padding else codes
        planes = codes.unflatten(-1, (blocks, -1, plane)).unbind(-2)
        target = self.codes[..., begin : begin + codes.shape[-2], :]
        # The bytes of a word, lowest first.
        if self.packing.kind == "fp8":
            first, second = planes
            low_and_high = [
                first << 4 | second & 15,
                first & 128 | first >> 4 & 7 | second >> 4 & 8 | second & 112,
            ]
        else:
            low_and_high = planes if bits == 8 else [planes[i] | planes[i + 1] << 4 for i in (0, 2)]
        target.view(torch.uint8).unflatten(-1, (plane, 2)).copy_(torch.stack(low_and_high, -1).transpose(-4, -3))

    def codes_of(self, rows: slice | Tensor) -> Tensor:
        """Return codes of some rows: [n, in_features] uint8."""
        words = self.codes[..., rows, :].transpose(-3, -2).contiguous()  # [n, blocks, plane]
        halves = words.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        if self.packing.kind == "fp8":
            low, high = halves
            planes = high & 128 | (high & 7) << 4 | low >> 4, (high & 8) << 4 | high & 112 | low & 15
        else:
            planes = halves if self.packing.bits == 8 else [part for half in halves for part in (half & 15, half >> 4)]
        return torch.stack(planes, -2).flatten(-3)[..., : self.in_features]

    def put_scales(self, begin: int, end: int, scales: Tensor) -> None:
        """Write those of rows [begin, end): [rows of scales, groups], or what broadcasts to it."""
        packing = self.packing
        self.folding.scales = self.folding.scales and packing.can_fold(scales)
        if packing.table(self.in_features) == "plain":
            self.scales[..., begin // packing.rows : -(-end // packing.rows)].copy_(scales.mT)
            return
        if packing.has_exponents:
            exponents = self._exponents()[..., begin:end, :, :]
            padding = exponents.shape[-2] * 4 - scales.shape[-1]
            exponents.copy_(torch.nn.functional.pad(scales, (0, padding)).unflatten(-1, (-1, 4)))
            return
        words = self._words()
        words[..., begin:end, :, :, 0].copy_(scales.unflatten(-1, words.shape[-3:-1]))
        self._check_zeros(begin, end)

    def scales_of(self, rows: slice | Tensor) -> Tensor:
        """Return scales of some rows of the weight: [n, groups]."""
        if self.packing.table(self.in_features) == "plain":
            return self._by_row(self.scales, rows)
        if self.packing.has_exponents:
            found = self._exponents()[..., rows, :, :].flatten(-2)
            return found[..., : self.packing.num_groups(self.in_features)].contiguous()
        return self._words()[..., rows, :, :, 0].flatten(-2)

    def put_zeros(self, begin: int, end: int, zeros: Tensor) -> None:
        """Write those of rows [begin, end): [rows of scales, groups] integers, or what broadcasts to it."""
        if self.zeros is not None:
            self.zeros[..., begin // self.packing.rows : -(-end // self.packing.rows)].copy_(zeros.mT)
            return
        beside, place = _MINUS_ZERO[self.packing.scale_dtype]
        bits = (zeros.to(torch.int32) << place | beside) - 2**16  # they begin with a sign
        words = self._words().view(torch.int16)
        words[..., begin:end, :, :, 1].copy_(bits.unflatten(-1, words.shape[-3:-1]))
        self._check_zeros(begin, end)

    def _check_zeros(self, begin: int, end: int) -> None:
        """Whether the rows that were put in, whose scales or zeros may still be 0, leave `folding.zeros` true."""
        if self.packing.has_zeros and self.packing.folded[0] > 0 and self.folding.zeros:
            products = self.scales_of(slice(begin, end)).float() * self.zeros_of(slice(begin, end))
            self.folding.zeros = bool((products == products.bfloat16()).all())

    def zeros_of(self, rows: slice | Tensor) -> Tensor:
        """Return zeros of some rows of the weight: [n, groups] uint8."""
        if self.zeros is not None:
            return self._by_row(self.zeros, rows)
        _, place = _MINUS_ZERO[self.packing.scale_dtype]
        words = self._words().view(torch.int16)[..., rows, :, :, 1].flatten(-2)
        return (words >> place & 15).to(torch.uint8)

    def _words(self) -> Tensor:
        """Return scales that lie in words as a view: [rows, words, groups of a word, scale and what is beside it]."""
        groups = 2 if self.packing.table(self.in_features) == "pairs" else 1
        values = self.scales.view(self.packing.scale_dtype)
        return values.unflatten(-1, (self.num_rows, groups, -1)).transpose(-4, -3)

    def _exponents(self) -> Tensor:
        """Return exponents that lie in words as a view: [rows, words, exponents of a word]."""
        return self.scales.view(torch.uint8).unflatten(-1, (self.num_rows, 4)).transpose(-3, -2)

    def _by_row(self, table: Tensor, rows: slice | Tensor) -> Tensor:
        if self.packing.rows > 1:
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=table.device)
            rows = rows // self.packing.rows
        # As bytes: torch gathers no float8 on the CPU.
        if table.element_size() == 1:
            return table.view(torch.uint8)[..., rows].view(table.dtype).mT
        return table[..., rows].mT


def empty_packed(packing: Packing, num_rows: int, in_features: int, device: torch.device | str) -> PackedWeight:
    """Return a weight that is not yet filled, but for the columns that its blocks have too many, whose codes are 0."""
    plane, groups, table = packing.plane(in_features), packing.num_groups(in_features), packing.table(in_features)
    num_blocks, scale_rows = -(-in_features // packing.block(plane)), -(-num_rows // packing.rows)
    make = torch.empty if in_features % packing.block(plane) == 0 else torch.zeros
    scales = {
        "plain": ((groups, scale_rows), packing.scale_dtype),
        "exponents": ((-(-groups // 4), num_rows), torch.int32),
        "pairs": ((groups // 2, num_rows), torch.int64 if packing.has_zeros else torch.int32),
        "words": ((groups, num_rows), torch.int32),
    }[table]
    options = dict(device=device)
    has_table_of_zeros = packing.has_zeros and table == "plain"
    return PackedWeight(
        packing,
        num_rows,
        in_features,
        make((num_blocks, num_rows, plane), dtype=torch.int16, **options),
        (torch.zeros if table == "words" or packing.has_zeros else torch.empty)(scales[0], dtype=scales[1], **options),
        torch.empty((groups, scale_rows), dtype=torch.uint8, **options) if has_table_of_zeros else None,
        torch.empty(num_rows, dtype=torch.float32, **options) if packing.has_global_scale else None,
        torch.empty(in_features, dtype=torch.int32, **options) if packing.has_group_index else None,
    )
