"""Weights in tensors of their own shape or of packed rows, with scales beside them: most formats but GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nanoinfer.layers.formats.base import Filling
from nanoinfer.layers.formats.bits import as_bytes, row_bytes, unpack
from nanoinfer.layers.formats.packed import Packed, checked, pieces_of_rows

ZEROS_NAME = "weight_zero_point"
"""The end of the name of the tensor that holds zeros."""
# Of a number of 8 bits (e4m3) without its sign.
_NAN = 0x7F
# The exponent that stands for NaN.
_NAN_EXPONENT = 255


@dataclass(frozen=True)
class PackedScaled(Packed):
    """Weights whose rows are those of the checkpoint's tensors.

    Attributes:
        words: the dtype of the checkpoint's codes: int32 (packed, without a sign), int8 (one for each weight, with a
            sign), uint8 (two in a byte) or float8_e4m3fn.
        scale_of_tensor: whether there is one scale for all rows.
        has_zeros_in_words: whether the checkpoint's zeros lie in words, along the rows; else each is an int8.
        codes_name, scales_name: the ends of the names of the checkpoint's tensors.
        global_scale_name: of the scale of a whole tensor; None: there is none.
    """

    words: torch.dtype = torch.int32
    scale_of_tensor: bool = False
    codes_name: str = "weight"
    scales_name: str = "weight_scale"
    global_scale_name: str | None = None
    has_zeros_in_words: bool = False

    def check_size(self, num_rows: int, in_features: int) -> None:
        if self.words == torch.uint8 and in_features % 8:
            raise ValueError(f"{self.where}.{self.codes_name} has {in_features} columns, which 8 does not divide")
        super().check_size(num_rows, in_features)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        fillings = super().views(module, begin, end) | self._codes(module, begin, end)
        fillings |= {self.scales_name: self._scales_of(module, begin, end)}
        if self.global_scale_name is not None:
            fillings[self.global_scale_name] = self._global_scale(module, begin, end)
        if self.packing.has_zeros:
            fillings[ZEROS_NAME] = self._zeros(module, begin, end)
        if self.packing.has_group_index:
            fillings["weight_g_idx"] = self.group_index(module)
        return fillings

    def _codes(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        count, in_features, bits = end - begin, module.in_features, self.packing.bits
        columns = row_bytes(in_features, bits) // 4 if self.words == torch.int32 else in_features
        if self.words == torch.uint8:
            columns = in_features // 2

        def fill(values: Tensor) -> None:
            for rows in pieces_of_rows(count, in_features * module.packed.stacked.numel()):
                codes = as_bytes(values[..., rows, :])
                if self.words == torch.int8:
                    codes = codes ^ 128
                elif self.words != torch.float8_e4m3fn:
                    codes = unpack(codes, bits, in_features)
                elif bool((codes & _NAN == _NAN).any()):
                    raise ValueError("holds NaN weights: the file is corrupt, download it again")
                module.packed.put_codes(begin + rows.start, codes)

        codes = Filling(((count, columns),), (self.words,), fill)
        if self.words != torch.int32:
            return {self.codes_name: codes}

        is_some = getattr(module, "shares", None) or getattr(module, "held_columns", None)

        def check_shape(shapes: Tensor) -> None:
            if is_some:  # of a weight whose shape this is
                return
            for shape in shapes.view(-1, 2).tolist():
                if shape != [count, in_features]:
                    raise ValueError(f"is {shape}, expected {[count, in_features]}")

        shape = Filling(((2,),), (torch.int64, torch.int32), check_shape, optional=True)
        return {self.codes_name: codes, "weight_shape": shape}

    def _scales_of(self, module: nn.Module, begin: int, end: int) -> Filling:
        packing, groups = self.packing, self.packing.num_groups(module.in_features)
        num_rows = -(-end // packing.rows) - begin // packing.rows

        def fill(values: Tensor) -> None:
            if values.dtype == torch.uint8 and bool((values == _NAN_EXPONENT).any()):
                raise ValueError("holds NaN scales: the file is corrupt, download it again")
            module.packed.put_scales(begin, end, checked(values).reshape(*module.packed.stacked, -1, groups))

        shapes: tuple[tuple[int, ...], ...] = ((num_rows, groups),)
        if self.scale_of_tensor:
            shapes = ((1,), (), (1, 1))
        elif groups == 1:
            shapes += ((num_rows,),)
        return Filling(shapes, (packing.scale_dtype,), fill, check=partial(self.check_finite, module, begin, end))

    def _global_scale(self, module: nn.Module, begin: int, end: int) -> Filling:
        def fill(values: Tensor) -> None:
            if bool((values <= 0).any()):
                least = values.min().item()
                raise ValueError(f"is {least:g}, it must be above 0: the file is corrupt, download it again")
            module.packed.global_scale[..., begin:end] = checked(values).reshape(*module.packed.stacked, 1)

        return Filling(((1,), ()), (torch.float32,), fill)

    def _zeros(self, module: nn.Module, begin: int, end: int) -> Filling:
        packing, count = self.packing, end - begin
        groups, middle = packing.num_groups(module.in_features), 2 ** (packing.bits - 1)
        num_rows = -(-end // packing.rows) - begin // packing.rows

        def fill_packed(words: Tensor) -> None:
            module.packed.put_zeros(begin, end, unpack(as_bytes(words.mT), packing.bits, count).mT)

        def fill_signed(values: Tensor) -> None:
            wide = values.to(torch.int16).reshape(*module.packed.stacked, -1, groups)
            if bool(((wide < -middle) | (wide >= middle)).any()):
                raise ValueError(f"has zero points that are no numbers of {packing.bits} bits")
            module.packed.put_zeros(begin, end, wide + middle)

        if self.has_zeros_in_words:
            return Filling(((-(-count * packing.bits // 32), groups),), (torch.int32,), fill_packed)
        shapes = ((1,), (), (1, 1)) if self.scale_of_tensor else ((num_rows, groups),)
        return Filling(shapes, (torch.int8,), fill_signed)
