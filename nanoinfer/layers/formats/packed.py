"""Weights of 4 or 8 bits with scales, held packed and expanded to a matrix for each product.

The expanded matrix is what the reference of a checkpoint's method computes, in its arithmetic and its order of
rounding, and is rounded to the model's dtype last. So a product has the bits of the product with a dense checkpoint
that holds this matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanoinfer.layers.formats.base import Filling
from nanoinfer.layers.formats.bits import E2M1_VALUES, powers_of_two, row_bytes, unpack
from nanoinfer.layers.formats.lookup import expanded_rows
from nanoinfer.layers.formats.matrix import MatrixFormat

# Weights that are expanded at a time, and the most bytes that the steps between codes and matrix take for one.
EXPANDED_AT_ONCE = 2**22
_BYTES_WHILE_EXPANDING = 18
# A checkpoint's tensors that say how activations were quantised, which they are not here.
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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


@dataclass(frozen=True)
class Packed(MatrixFormat):
    """Weights in one `Packing`. A subclass knows how the tensors of a checkpoint hold them.

    Parameters of a module: codes [num_rows, bytes of a row], uint8 or float8; scales [num_rows / rows, groups], where
    `rows` neighbours share a scale; zeros like the scales, uint8; global_scale [num_rows, 1], float32; group_index
    [in_features], int32.

    Attributes:
        packing: how weights lie on the device.
        where: the module's name in the checkpoint, for messages.
    """

    packing: Packing
    where: str = field(default="", compare=False)

    name = "packed"

    def allocate(self, module: nn.Module, num_rows: int, in_features: int, *, dtype: torch.dtype, device) -> None:
        packing, groups = self.packing, self.packing.num_groups(in_features)
        self.check_size(num_rows, in_features)
        code_dtype = torch.float8_e4m3fn if packing.kind == "fp8" else torch.uint8

        def make(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        module.codes = make(num_rows, row_bytes(in_features, packing.bits), dtype=code_dtype)
        # Made here, because a captured graph cannot copy it from the host.
        module.code_values = torch.tensor(E2M1_VALUES, device=device) if packing.kind == "fp4" else None
        num_scale_rows = -(-num_rows // packing.rows)
        module.scales = make(num_scale_rows, groups, dtype=packing.scale_dtype)
        if packing.has_zeros:
            module.zeros = make(num_scale_rows, groups, dtype=torch.uint8)
        if packing.has_global_scale:
            module.global_scale = make(num_rows, 1, dtype=torch.float32)
        if packing.has_group_index:
            module.group_index = make(in_features, dtype=torch.int32)

    def check_size(self, num_rows: int, in_features: int) -> None:
        """Raises ValueError if the format cannot hold a weight of this size."""
        columns = self.packing.columns
        if columns is not None and self.packing.rows == 1 and in_features % columns:
            raise ValueError(
                f"{self.where} has {in_features} input features, which groups of {columns} do not divide: the config's "
                "group size is not that of the weights"
            )

    def can_merge(self, sizes: list[int]) -> bool:
        """Whether projections of so many rows each can lie in one weight of this format."""
        return not self.packing.has_group_index and not any(size % self.packing.rows for size in sizes)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        found = dict.fromkeys(_OF_ACTIVATIONS, Filling((), (), None, optional=True))
        return found | self.stored(module, begin, end)

    @abstractmethod
    def stored(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        """Return what the checkpoint's tensors fill of rows [begin, end), without those of activations."""

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        packing, codes = self.packing, module.codes
        if packing.kind == "fp8":
            for rows in codes.split(max(1, EXPANDED_AT_ONCE // codes.shape[1])):
                rows.copy_(torch.randn(rows.shape, device=rows.device, generator=generator))
        else:
            codes.random_(0, 256, generator=generator)
        # The standard deviation of the codes.
        deviation = {"fp8": 1.0, "fp4": 2.81, "int": 2**packing.bits / 12**0.5}[packing.kind]
        if packing.scale_dtype == torch.uint8:
            module.scales.fill_(120)  # 2**-7, the nearest power
        else:
            module.scales.fill_(1.0 if packing.has_global_scale else 0.02 / deviation)
        if packing.has_zeros:
            module.zeros.fill_(2 ** (packing.bits - 1))
        if packing.has_global_scale:
            module.global_scale.fill_(deviation / 0.02 if packing.divides_global_scale else 0.02 / deviation)
        if packing.has_group_index:
            columns = packing.columns or module.in_features
            module.group_index.copy_(torch.arange(module.in_features, device=codes.device) // columns)

    def matrix(self, module: nn.Module) -> Tensor:
        out = module.scratch[: module.num_rows * module.in_features].view(module.num_rows, module.in_features)
        self.expand_into(module, out)
        return out

    def lookup(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return rows of the weight as the reference has them, for embeddings: [N] -> [N, in_features]."""
        return expanded_rows(self.expand, module, ids)

    def project_gated(self, module: nn.Module, x: Tensor, activation: str) -> Tensor | None:
        # Elsewhere nothing computes an activation with the product, and the matrix would be expanded in vain.
        return super().project_gated(module, x, activation) if x.is_cuda else None

    def scratch_shape(self, module: nn.Module) -> tuple[int, int]:
        return module.num_rows, module.in_features

    def temporary_bytes(self, module: nn.Module) -> int:
        largest = max(EXPANDED_AT_ONCE, module.in_features)
        return _BYTES_WHILE_EXPANDING * min(largest, module.num_rows * module.in_features)

    def expand_into(self, module: nn.Module, out: Tensor) -> None:
        """Write the weight as a matrix to `out`, [num_rows, in_features] in the model's dtype."""
        step = max(1, EXPANDED_AT_ONCE // out.shape[1])
        for begin in range(0, len(out), step):
            rows = out[begin : begin + step]
            rows.copy_(self.expand(module, begin, begin + len(rows)))

    def expand(self, module: nn.Module, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of the matrix as the reference has it: [end - begin, in_features]."""
        in_features, packing, scales = module.in_features, self.packing, self._scales(module, begin, end)
        dtype = scales.dtype if packing.product_dtype is None else packing.product_dtype
        codes = module.codes[begin:end]
        if packing.kind == "fp8":
            values = codes[:, :in_features].to(dtype)
        elif packing.kind == "fp4":
            values = module.code_values.to(dtype)[unpack(codes, 4, in_features).int()]
        else:
            values = unpack(codes, packing.bits, in_features).to(torch.int16)
            if packing.has_zeros:
                values = self._by_group(torch.sub, values, self._rows(module.zeros, begin, end), module)
            else:
                values = values - 2 ** (packing.bits - 1)
            values = values.to(dtype)
        weights = self._by_group(torch.mul, values, scales.to(dtype), module)
        return weights if packing.result_dtype is None else weights.to(packing.result_dtype)

    def _scales(self, module: nn.Module, begin: int, end: int) -> Tensor:
        scales = self._rows(module.scales, begin, end)
        if self.packing.scale_dtype == torch.uint8:
            return powers_of_two(scales)
        if not self.packing.has_global_scale:
            return scales
        factor, scales = module.global_scale[begin:end], scales.float()
        return scales / factor if self.packing.divides_global_scale else scales * factor

    def _rows(self, table: Tensor, begin: int, end: int) -> Tensor:
        """Return a row of the table for each row of the weight."""
        if self.packing.rows == 1:
            return table[begin:end]
        return table[torch.arange(begin, end, device=table.device) // self.packing.rows]

    def _by_group(self, operation: Callable, values: Tensor, table: Tensor, module: nn.Module) -> Tensor:
        """Return operation(values, number of the value's group): [n, in_features], [n, groups] -> [n, in_features]."""
        if self.packing.has_group_index:
            return operation(values, table[:, module.group_index])
        groups, columns = table.shape[1], self.packing.columns
        if groups == 1:
            return operation(values, table)
        if groups * columns == module.in_features:
            return operation(values.unflatten(1, (groups, columns)), table.unsqueeze(2)).flatten(1)
        spread = table.unsqueeze(2).expand(-1, -1, columns).flatten(1)
        return operation(values, spread[:, : module.in_features])


def checked(values: Tensor) -> Tensor:
    """Return scales that were read.

    Raises:
        ValueError: some are NaN or infinite.
    """
    if not bool(torch.isfinite(values.float()).all()):
        raise ValueError("holds NaN or infinite scales: the file is corrupt, download it again")
    return values
