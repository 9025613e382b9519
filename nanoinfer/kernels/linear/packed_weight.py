"""Weights that lie as `packing` says: tensors that are filled by rows, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.kernels.linear.wide_instructions import largest_scale

# What a kernel adds to a code for its zero, by the scales' dtype: bits beside the zero, and where its lowest bit is.
# In bfloat16 minus the zero times 2**-129, in float16 minus (1024 + zero). See `instructions`.
_MINUS_ZERO = {torch.bfloat16: (0x8000, 4), torch.float16: (0xE400, 0)}


@dataclass
class Folding:
    """What the scales and zeros that were put into a weight allow; weights that one kernel multiplies share it.

    Attributes:
        scales: whether all scales can be folded; see `Packing.can_fold`, and `largest_scale` of scales in words of
            their own.
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
        high_bits: [blocks / blocks_of_word, num_rows, plane] int16; None: columns have 16 bits.
        factors: [in_features / factor_columns, num_rows] int32, see `ScaleWords.packed_factors`; None: none.
        folding: what was put in allows.
        cut: where sums with it are cut; None: they are whole. See `cuts`.
    """

    packing: Packing
    num_rows: int
    in_features: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: Tensor | None = None
    group_index: Tensor | None = None
    high_bits: Tensor | None = None
    factors: Tensor | None = None
    folding: Folding = field(default_factory=Folding)
    cut: int | None = None

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
        blocks, _, plane = self.codes.shape[-3:]
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
            low_and_high = [_byte_of(planes, self.packing.bits, first) for first in (0, 8)]
        target.view(torch.uint8).unflatten(-1, (plane, 2)).copy_(torch.stack(low_and_high, -1).transpose(-4, -3))
        if self.high_bits is not None:
            count = self.packing.blocks_of_word
            fields = _byte_of(planes, self.packing.bits, 16)
            fields = torch.nn.functional.pad(fields, (0, 0, 0, -blocks % count)).unflatten(-2, (-1, count))
            if count == 4:
                fields = fields[..., ::2, :] | fields[..., 1::2, :] << 4
            words = fields.mT.contiguous().view(torch.int16).squeeze(-1)  # [n, words, plane]
            self.high_bits[..., begin : begin + codes.shape[-2], :].copy_(words.transpose(-3, -2))

    def codes_of(self, rows: slice | Tensor) -> Tensor:
        """Return codes of some rows: [n, in_features] uint8."""
        words = self.codes[..., rows, :].transpose(-3, -2).contiguous()  # [n, blocks, plane]
        fields = list(words.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1))
        packing, blocks = self.packing, self.codes.shape[-3]
        if self.high_bits is not None:
            high = self.high_bits[..., rows, :].transpose(-3, -2).contiguous().unsqueeze(-1).view(torch.uint8).mT
            if packing.blocks_of_word == 4:
                high = torch.stack((high & 15, high >> 4), -2).flatten(-3, -2)
            high = high.flatten(-3, -2)[..., :blocks, :]
            fields.append(high)
        if packing.kind == "fp8":
            low, high = fields
            planes = [high & 128 | (high & 7) << 4 | low >> 4, (high & 8) << 4 | high & 112 | low & 15]
        else:
            planes = [_field_of(fields, packing.bits, p) for p in range(packing.planes)]
        return torch.stack(planes, -2).flatten(-3)[..., : self.in_features]

    def put_scale_words(self, begin: int, end: int, scales: Tensor, minima: Tensor | None, *factors: Tensor) -> None:
        """Write scales of rows [begin, end), [n, groups], as float16 or integers, minima likewise, and factors."""
        words = self.packing.scale_words
        if self.folding.scales:
            self.folding.scales = self._can_raise(scales, *factors[:1])
        padding = self.scales.shape[-2] * words.groups - scales.shape[-1]
        if padding:
            scales = torch.nn.functional.pad(scales, (0, padding))
            minima = None if minima is None else torch.nn.functional.pad(minima, (0, padding))
        self.scales[..., begin:end].copy_(words.packed(scales, minima).mT)
        if words.has_factors:
            self.factors[..., begin:end].copy_(words.packed_factors(*factors, *[None] * (2 - len(factors))).mT)

    def _can_raise(self, scales: Tensor, factors: Tensor | None = None) -> bool:
        """Whether scales, and the factors of their blocks, are below `largest_scale`."""
        limit, largest = largest_scale(self.packing), scales.float().abs()
        if factors is not None:
            largest = largest.unflatten(-1, (factors.shape[-1], -1)).amax(-1).clamp(min=1) * factors.float().abs()
        return bool((largest < limit).all())

    def float_scales_of(self, rows: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima of some rows, [n, groups] float32: the products with the factors are exact."""
        packing, groups = self.packing, self.packing.num_groups(self.in_features)
        scales = [
            one if one is None else one[..., :groups].float()
            for one in packing.scale_words.unpacked(self.scales[..., rows].mT)
        ]
        if packing.scale_words.has_factors:
            factors = packing.scale_words.unpacked_factors(self.factors[..., rows].mT)
            times = packing.factor_columns // packing.columns
            scales = [
                one if one is None else one * factor.repeat_interleave(times, -1)
                for one, factor in zip(scales, factors, strict=True)
            ]
        return tuple(scales)

    def put_scales(self, begin: int, end: int, scales: Tensor) -> None:
        """Write those of rows [begin, end): [rows of scales, groups], or what broadcasts to it."""
        packing = self.packing
        self.folding.scales = self.folding.scales and packing.can_fold(scales)
        if self.packing.table(self.in_features) == "plain":
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
            exponents = self._exponents()[..., rows, :, :].flatten(-2)
            return exponents[..., : self.packing.num_groups(self.in_features)].contiguous()
        return self._words()[..., rows, :, :, 0].flatten(-2)

    def put_zeros(self, begin: int, end: int, zeros: Tensor) -> None:
        """Write those of rows [begin, end): [rows of scales, groups] integers, or what broadcasts to it."""
        if self.zeros is not None:
            self.zeros[..., begin // self.packing.rows : -(-end // self.packing.rows)].copy_(zeros.mT)
            return
        beside, shift = _MINUS_ZERO[self.packing.scale_dtype]
        bits = (zeros.to(torch.int32) << shift | beside) - 2**16  # they begin with a sign
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
        _, shift = _MINUS_ZERO[self.packing.scale_dtype]
        words = self._words().view(torch.int16)[..., rows, :, :, 1].flatten(-2)
        return (words >> shift & 15).to(torch.uint8)

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


def empty_packed(
    packing: Packing, num_rows: int, in_features: int, device: torch.device | str, cut: int | None = None
) -> PackedWeight:
    """Return a weight to be filled. The last block's padding columns have the code 0 already."""
    plane, table = packing.plane(in_features, cut), packing.table(in_features)
    groups = packing.num_groups(in_features)
    num_blocks, scale_rows = -(-in_features // packing.block(plane)), -(-num_rows // packing.rows)
    make = torch.empty if in_features % packing.block(plane) == 0 else torch.zeros
    scales = {
        "plain": ((groups, scale_rows), packing.scale_dtype),
        "exponents": ((-(-groups // 4), num_rows), torch.int32),
        "pairs": ((groups // 2, num_rows), torch.int64 if packing.has_zeros else torch.int32),
        "words": ((groups, num_rows), torch.int32),
        "scale words": ((0, num_rows), torch.int32),
    }[table]
    options = dict(device=device)
    high_bits = factors = None
    if packing.high_bits:
        size = -(-num_blocks // packing.blocks_of_word), num_rows, plane
        high_bits = make(size, dtype=torch.int16, **options)
    if packing.scale_words is not None:
        columns = num_blocks * packing.block(plane)
        scales = (-(-columns // (packing.columns * packing.scale_words.groups)), num_rows), torch.int32
        if packing.scale_words.has_factors:
            factors = torch.empty(in_features // packing.factor_columns, num_rows, dtype=torch.int32, **options)
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
        high_bits,
        factors,
        cut=cut,
    )


def _byte_of(planes: Sequence[Tensor], bits: int, first: int) -> Tensor:
    """Return the bits from `first` on of columns whose planes lie one after the other, the first lowest."""
    merged = None
    for number, codes in enumerate(planes):
        shift = number * bits - first
        if -bits < shift < 8:
            part = codes << shift if shift >= 0 else codes >> -shift
            merged = part if merged is None else merged | part
    return merged


def _field_of(parts: Sequence[Tensor], bits: int, number: int) -> Tensor:
    """Return the codes of a plane. parts: the bytes of columns, the lowest first."""
    first, shift = divmod(number * bits, 8)
    field = parts[first] >> shift
    if shift + bits > 8:
        field = field | parts[first + 1] << 8 - shift
    return field & (1 << bits) - 1
