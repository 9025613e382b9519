"""Weights in tensors of their own shape or of packed rows, with scales beside them: most formats but GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.layers.formats.base import Filling
from nanoinfer.layers.formats.bits import as_bytes, unpack
from nanoinfer.layers.formats.packed import Packed, checked

_FLOAT8 = torch.float8_e4m3fn
# The exponent that stands for NaN.
_NAN_EXPONENT = 255


@dataclass(frozen=True, kw_only=True)
class Names:
    """How a checkpoint calls its tensors.

    Attributes:
        codes, scales: the ends of their names.
        global_scale: of the scale of a whole tensor; None: there is none.
    """

    codes: str = "weight"
    scales: str = "weight_scale"
    global_scale: str | None = None


@dataclass(frozen=True)
class PackedScaled(Packed):
    """Weights whose rows are those of the checkpoint's tensors.

    Attributes:
        names: of the checkpoint's tensors.
        words: the dtype of the checkpoint's codes: int32 (packed, without a sign), int8 (one for each weight, with a
            sign), uint8 (two in a byte) or float8_e4m3fn.
        scale_of_tensor: whether there is one scale for all rows.
    """

    names: Names = Names()
    words: torch.dtype = torch.int32
    scale_of_tensor: bool = False

    def check_size(self, num_rows: int, in_features: int) -> None:
        if self.words == torch.uint8 and in_features % 8:
            raise ValueError(f"{self.where}.{self.names.codes} has {in_features} columns, which 8 does not divide")
        super().check_size(num_rows, in_features)

    def stored(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        found = self._codes(module, begin, end) | {self.names.scales: self._scales_of(module, begin, end)}
        if self.names.global_scale is not None:
            found[self.names.global_scale] = self._global_scale(module, begin, end)
        if self.packing.has_zeros:
            found["weight_zero_point"] = self._zeros(module, begin, end)
        if self.packing.has_group_index:
            found["weight_g_idx"] = self._group_index(module)
        return found

    def _codes(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        rows, count, name = module.codes[begin:end], end - begin, self.names.codes
        if self.words == torch.int8:

            def fill_signed(values: Tensor) -> None:
                rows[:, : module.in_features].copy_(values.view(torch.uint8) ^ 128)

            return {name: Filling(((count, module.in_features),), (torch.int8,), fill_signed)}
        if self.words != torch.int32:
            return {name: rows[:, : module.in_features] if self.packing.bits == 8 else rows}

        def check_shape(shape: Tensor) -> None:
            if shape.tolist() != [count, module.in_features]:
                raise ValueError(f"is {shape.tolist()}, expected {[count, module.in_features]}")

        shape = Filling(((2,),), (torch.int64, torch.int32), check_shape, optional=True)
        return {name: rows.view(torch.int32), "weight_shape": shape}

    def _scales_of(self, module: nn.Module, begin: int, end: int) -> Filling:
        packing = self.packing
        scales, groups = _rows_of(module.scales, begin, end, packing.rows), packing.num_groups(module.in_features)

        def fill(values: Tensor) -> None:
            if values.dtype == torch.uint8 and bool((values == _NAN_EXPONENT).any()):
                raise ValueError("holds NaN scales: the file is corrupt, download it again")
            scales.copy_(checked(values) if values.ndim == 2 else checked(values).reshape(-1, 1))

        shapes: tuple[tuple[int, ...], ...] = ((len(scales), groups),)
        if self.scale_of_tensor:
            shapes = ((1,), (), (1, 1))
        elif groups == 1:
            shapes += ((len(scales),),)
        return Filling(shapes, (packing.scale_dtype,), fill)

    def _global_scale(self, module: nn.Module, begin: int, end: int) -> Filling:
        def fill(values: Tensor) -> None:
            if not bool((checked(values) > 0).all()):
                raise ValueError(f"is {values.item():g}, it must be above 0: the file is corrupt, download it again")
            module.global_scale[begin:end].copy_(values.reshape(1, 1))

        return Filling(((1,), ()), (torch.float32,), fill)

    def _zeros(self, module: nn.Module, begin: int, end: int) -> Filling:
        packing, count = self.packing, end - begin
        zeros, middle = _rows_of(module.zeros, begin, end, packing.rows), 2 ** (packing.bits - 1)
        groups = zeros.shape[1]

        def fill_packed(words: Tensor) -> None:
            zeros.copy_(unpack(as_bytes(words.t()), packing.bits, count).t())

        def fill_signed(values: Tensor) -> None:
            wide = values.to(torch.int16) if values.ndim == 2 else values.to(torch.int16).reshape(-1, 1)
            if bool(((wide < -middle) | (wide >= middle)).any()):
                raise ValueError(f"has zero points that are no numbers of {packing.bits} bits")
            zeros.copy_(wide + middle)

        if self.words == torch.int32 and not self.scale_of_tensor:
            return Filling(((-(-count * packing.bits // 32), groups),), (torch.int32,), fill_packed)
        shapes = ((1,), (), (1, 1)) if self.scale_of_tensor else ((len(zeros), groups),)
        return Filling(shapes, (torch.int8,), fill_signed)

    def _group_index(self, module: nn.Module) -> Filling:
        groups = module.scales.shape[1]

        def fill(values: Tensor) -> None:
            if not bool(((values >= 0) & (values < groups)).all()):
                raise ValueError(f"names groups that are not there: it must hold numbers from 0 to {groups - 1}")
            module.group_index.copy_(values)

        return Filling(((module.in_features,),), (torch.int32,), fill)


def _rows_of(table: Tensor, begin: int, end: int, rows: int) -> Tensor:
    """Return the table's rows for rows [begin, end) of the weight, `rows` of which share one."""
    return table[begin // rows : -(-end // rows)]
