"""Merged projections that have formats of their own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.layers.formats.base import ExpandedFormat, Filling, WeightFormat
from nanoinfer.layers.formats.packed import Packed


def merge_formats(formats: list[WeightFormat], sizes: list[int]) -> WeightFormat:
    """Return the format of merged projections, of so many rows each, that have these formats in the checkpoint.

    Adjacent projections of one format are stored as one part: where v alone has another type, q and k are one product.
    """
    parts: list[tuple[WeightFormat, list[int]]] = []
    for weight_format, size in zip(formats, sizes, strict=True):
        if parts and parts[-1][0] == weight_format and _can_merge(weight_format, [*parts[-1][1], size]):
            parts[-1][1].append(size)
        else:
            parts.append((weight_format, [size]))
    if len(parts) == 1:
        return parts[0][0]
    return Parted([weight_format for weight_format, _ in parts], [sum(rows) for _, rows in parts])


def _can_merge(weight_format: WeightFormat, sizes: list[int]) -> bool:
    return not isinstance(weight_format, Packed) or weight_format.can_merge(sizes)


class Parted(ExpandedFormat):
    """Parts of some projections one below the other, each in its own format.

    On a GPU few rows are multiplied with each part by itself, many with the matrix of all. The bits are the same.

    `held` of a module has for each part its format, and what that takes for a module. The parameters are the module's
    as well.
    """

    def __init__(self, formats: list[WeightFormat], sizes: list[int]) -> None:
        self._formats, self._sizes = formats, sizes

    def allocate(
        self, module: nn.Module, num_rows: int, in_features: int, *, cut: int | None = None, dtype: torch.dtype, device
    ) -> None:
        assert cut is None, "sums in parts are those of one projection"
        of_all = dict(in_features=in_features, shares=getattr(module, "shares", None))
        projections = [SimpleNamespace(num_rows=size, **of_all) for size in self._sizes]
        module.held = list(zip(self._formats, projections, strict=True))
        for index, (weight_format, projection) in enumerate(module.held):
            weight_format.allocate(projection, projection.num_rows, in_features, dtype=dtype, device=device)
            for name, value in vars(projection).items():
                if isinstance(value, nn.Parameter):
                    module.register_parameter(f"{name}_of_projection_{index}", value)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        first = 0
        for (weight_format, projection), size in zip(module.held, self._sizes, strict=True):
            if begin < first + size:
                assert end <= first + size, "a projection lies in one part"
                return weight_format.views(projection, begin - first, end - first)
            first += size
        raise AssertionError(f"there are no rows {begin} to {end}")

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        for weight_format, projection in module.held:
            weight_format.fill_with_noise(projection, generator)

    def product(
        self,
        module: nn.Module,
        x: Tensor,
        out: Tensor | None = None,
        activation: str | None = None,
        in_parts: bool = False,
    ) -> Tensor | None:
        if len(x) > MAX_ROWS:
            return None
        biases = [None] * len(self._sizes) if module.bias is None else module.bias.split(self._sizes)
        held, operations = list(zip(module.held, biases, strict=True)), module.operations
        targets = [None] * len(held)
        if len(x) == 1:  # of a single row the parts are contiguous, so each is written in place
            out = x.new_empty(1, sum(self._sizes)) if out is None else out
            targets = out.split(self._sizes, 1)
        packed = {
            index: operations.packed_linear(x, projection.packed, bias, out=targets[index])
            for index, ((weight_format, projection), bias) in enumerate(held)
            if isinstance(weight_format, Packed)
        }
        if any(one is None for one in packed.values()):
            return None  # if one part must be expanded, the caller expands all
        products = [
            packed[index]
            if index in packed
            else operations.linear(x, weight_format.matrix(projection), bias, out=targets[index])
            for index, ((weight_format, projection), bias) in enumerate(held)
        ]
        product = out if len(x) == 1 else torch.cat(products, 1, out=out)
        del packed, products  # free them before the activation allocates
        return product if activation is None else operations.act_and_mul(product, activation)

    def expand_into(self, module: nn.Module, out: Tensor) -> None:
        for (weight_format, projection), rows in zip(module.held, out.split(self._sizes), strict=True):
            weight_format.expand_into(projection, rows)
