"""Merged projections whose parts have formats of their own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.layers.formats.base import ExpandedFormat, Filling, WeightFormat
from nanoinfer.layers.formats.packed import Packed


def merged(formats: list[WeightFormat], sizes: list[int]) -> WeightFormat:
    """Return the format of a projection whose parts, of so many rows each, have these formats in the checkpoint."""
    first = formats[0]
    is_one = all(other == first for other in formats) and (not isinstance(first, Packed) or first.can_merge(sizes))
    return first if is_one or len(formats) == 1 else Parted(formats, sizes)


class Parted(ExpandedFormat):
    """Parts one below the other, each in its own format.

    On a GPU few rows are multiplied with each part by itself, many with the matrix of all parts. The bits are the same.

    `held` of a module has for each part its format, and what that takes for a module. The parameters are the module's
    as well.
    """

    def __init__(self, formats: list[WeightFormat], sizes: list[int]) -> None:
        self._formats, self._sizes = formats, sizes

    def allocate(self, module: nn.Module, num_rows: int, in_features: int, *, dtype: torch.dtype, device) -> None:
        parts = [SimpleNamespace(num_rows=size, in_features=in_features) for size in self._sizes]
        module.held = list(zip(self._formats, parts, strict=True))
        for index, (weight_format, part) in enumerate(module.held):
            weight_format.allocate(part, part.num_rows, in_features, dtype=dtype, device=device)
            for name, value in vars(part).items():
                if isinstance(value, nn.Parameter):
                    module.register_parameter(f"{name}_of_part_{index}", value)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        index = next(i for i in range(len(self._sizes)) if sum(self._sizes[:i]) == begin)
        assert end - begin == self._sizes[index], "a part is filled as a whole"
        weight_format, part = module.held[index]
        return weight_format.views(part, 0, part.num_rows)

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        for weight_format, part in module.held:
            weight_format.fill_with_noise(part, generator)

    def product(
        self, module: nn.Module, x: Tensor, out: Tensor | None = None, activation: str | None = None, parts: int = 1
    ) -> Tensor | None:
        if len(x) > MAX_ROWS or parts > 1:
            return None
        biases = [None] * len(self._sizes) if module.bias is None else module.bias.split(self._sizes)
        held, operations = list(zip(module.held, biases, strict=True)), module.operations
        packed = {
            index: operations.packed_linear(x, part.packed, bias)
            for index, ((weight_format, part), bias) in enumerate(held)
            if isinstance(weight_format, Packed)
        }
        if any(product is None for product in packed.values()):
            return None  # where a part must be expanded, all are
        products = [
            packed[index] if index in packed else operations.linear(x, weight_format.matrix(part), bias)
            for index, ((weight_format, part), bias) in enumerate(held)
        ]
        found = torch.cat(products, 1, out=out)
        del packed, products  # an activation needs memory, too
        return found if activation is None else operations.act_and_mul(found, activation)

    def expand_into(self, module: nn.Module, out: Tensor) -> None:
        for (weight_format, part), rows in zip(module.held, out.split(self._sizes), strict=True):
            weight_format.expand_into(part, rows)
