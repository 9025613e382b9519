"""GGUF: weights in the block types of llama.cpp, expanded with the arithmetic of the package `gguf`.

A row is a row of blocks of 32 or 256 columns, each with its scales and codes in its own order of bits. What it stands
for is computed in float32, and rounded once to the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nanoinfer.layers.formats.base import DENSE, Filling, WeightFormat
from nanoinfer.layers.formats.gguf_blocks import BLOCKS, Block
from nanoinfer.layers.formats.packed import Packed, pieces_of_rows
from nanoinfer.layers.formats.quantization import Quantization

_WIDE = ("F32", "F16", "BF16")
# The exponent that stands for NaN.
_NAN_EXPONENT = 255


@dataclass(frozen=True)
class PackedBlocks(Packed):
    """Weights whose tensor is rows of blocks: [num_rows, bytes of a row] uint8.

    Attributes:
        type_name: the type of the blocks.
    """

    type_name: str = "Q8_0"

    @property
    def _block(self) -> Block:
        return BLOCKS[self.type_name]

    def check_size(self, num_rows: int, in_features: int) -> None:
        if in_features % self._block.columns:
            raise ValueError(
                f"{self.where} has {in_features} input features, which blocks of {self._block.columns} "
                f"({self.type_name}) do not divide"
            )

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        row_bytes = module.in_features // self._block.columns * self._block.num_bytes

        def fill(pieces: Iterable[Tensor]) -> None:
            first = begin
            for piece in pieces:
                count, stacked = piece.shape[-2], math.prod(piece.shape[:-2])
                for rows in pieces_of_rows(count, module.in_features * stacked):
                    self._put(module, first + rows.start, piece[..., rows, :])
                first += count

        check = partial(self.check_finite, module, begin, end)
        return {"weight": Filling(((end - begin, row_bytes),), (torch.uint8,), fill, by_rows=True, check=check)}

    def _put(self, module: nn.Module, begin: int, rows: Tensor) -> None:
        """Write rows of a weight from `begin` on: [..., n, bytes of a row]."""
        values = self._block.values(rows.unflatten(-1, (-1, self._block.num_bytes)))
        numbers = [one for one in (values.scales, values.minima, *values.factors) if one is not None]
        has_nan = values.scales.dtype == torch.uint8 and self.packing.has_exponents
        if has_nan:
            has_nan = bool((values.scales == _NAN_EXPONENT).any())
        if has_nan or not all(bool(one.isfinite().all()) for one in numbers if one.dtype == torch.float16):
            raise ValueError("holds NaN or infinite scales: the file is corrupt, download it again")
        packed, end = module.packed, begin + rows.shape[-2]
        packed.put_codes(begin, values.codes.flatten(-2))
        scales, minima = (one if one is None else one.flatten(-2) for one in (values.scales, values.minima))
        if self.packing.scale_words is None:
            packed.put_scales(begin, end, scales)
        else:
            packed.put_scale_words(begin, end, scales, minima, *(one.flatten(-2) for one in values.factors))


class GGUF(Quantization):
    """Each weight has the type of its tensor."""

    name = "gguf"

    def of(self, name: str) -> WeightFormat:
        block_type = (self.tensors.block_types or {}).get(f"{name}.weight")
        if block_type is None or block_type in _WIDE:
            return DENSE
        if block_type not in BLOCKS:
            known = ", ".join((*_WIDE, *BLOCKS))
            raise ValueError(f"{name} has blocks of type {block_type}, which is not supported. Supported: {known}")
        return PackedBlocks(BLOCKS[block_type].packing, name, block_type)

    def of_embeddings(self, name: str) -> WeightFormat:
        return self.of(name)
