"""Weights of 2 to 8 bits with scales, held packed, and expanded inside kernels or to a matrix for each product.

The matrix is what the reference of a checkpoint's method computes, in its arithmetic and its order of rounding, and is
rounded to the model's dtype last. So a product has the bits of the product with a dense checkpoint that holds this
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.kernels.linear.packed_weight import PackedWeight, empty_packed
from nanoinfer.kernels.linear.packing import IQ4_VALUES, Packing
from nanoinfer.kernels.operations import operations_of
from nanoinfer.layers.formats.base import ExpandedFormat, Filling, fill_on_its_device
from nanoinfer.layers.formats.bits import E2M1_VALUES

# Weights expanded at a time where no kernel does it, and the most bytes of temporaries for each.
EXPANDED_AT_ONCE = 2**22
_BYTES_WHILE_EXPANDING = 18
# The largest codes of kinds that are no integers.
_LARGEST = {"fp8": 448, "fp4": 6, "iq4": 127}
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale")


@dataclass(frozen=True)
class Packed(ExpandedFormat):
    """Weights in one `Packing`. A subclass knows how the tensors of a checkpoint hold them.

    `packed` of a module is a `PackedWeight`, whose tensors are the module's parameters; `dtype` is the model's.

    Attributes:
        packing: how weights lie on the device.
        where: the module's name in the checkpoint, for messages.
    """

    packing: Packing
    where: str = field(default="", compare=False)

    @property
    def column_block(self) -> int:
        packing = self.packing
        return 1 if packing.has_group_index else packing.factor_columns or packing.columns or 1

    def allocate(
        self, module: nn.Module, num_rows: int, in_features: int, *, cut: int | None = None, dtype: torch.dtype, device
    ) -> None:
        self.check_size(num_rows, in_features)
        module.dtype, module.packed = dtype, empty_packed(self.packing, num_rows, in_features, device, cut)
        for name in ("codes", "scales", "zeros", "global_scale", "group_index", "high_bits", "factors"):
            if (tensor := getattr(module.packed, name)) is not None:
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    def check_size(self, num_rows: int, in_features: int) -> None:
        """Raise ValueError if the format cannot hold a weight of this size."""
        columns = self.packing.columns
        if columns is not None and self.packing.rows == 1 and in_features % columns:
            raise ValueError(
                f"{self.where} has {in_features} input features, which groups of {columns} do not divide: the config's "
                "group size is not that of the weights"
            )

    def can_merge(self, sizes: list[int]) -> bool:
        """Whether projections of so many rows each can lie in one weight of this format."""
        return not self.packing.has_group_index and not any(size % self.packing.rows for size in sizes)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        """Name what says how activations were quantised. None of it is read: they are not quantised here."""
        return dict.fromkeys(_OF_ACTIVATIONS, Filling((), (), None, optional=True))

    def group_index(self, module: nn.Module) -> Filling:
        """Return what a checkpoint's table of each column's group fills."""
        groups = self.packing.num_groups(module.in_features)

        def fill(values: Tensor) -> None:
            if not bool(((values >= 0) & (values < groups)).all()):
                raise ValueError(f"names groups that are not there: it must hold numbers from 0 to {groups - 1}")
            module.packed.group_index.copy_(values)

        return Filling(((module.in_features,),), (torch.int32,), fill)

    def check_finite(self, module: nn.Module, begin: int, end: int) -> None:
        """Raise ValueError if weights of rows [begin, end) are NaN or infinite; all that they are made of is filled.

        Only rows of which the largest code would make such a weight are expanded.
        """
        largest = self._largest(module, slice(begin, end)).to(module.dtype)
        doubtful = torch.nonzero(~largest.isfinite())
        if module.packed.stacked:
            for number in doubtful[:, 0].unique().tolist():
                one = SimpleNamespace(**vars(module) | {"packed": module.packed.of(number)})
                self.check_finite(one, begin, end)
            return
        doubtful = begin + doubtful[:, 0]
        for rows in pieces_of_rows(len(doubtful), module.in_features):
            if not bool(self.expand(module, doubtful[rows]).to(module.dtype).isfinite().all()):
                raise ValueError(
                    f"makes weights NaN or infinite in {str(module.dtype)[6:]}, the model's dtype: the file is "
                    "corrupt, download it again, or give a dtype of wider range"
                )

    def _largest(self, module: nn.Module, rows: slice) -> Tensor:
        """Return for each row what no magnitude of its weights is above, before it is rounded to the model's dtype."""
        packing = self.packing
        largest = _LARGEST.get(packing.kind, 2**packing.bits - 1)
        if packing.scale_words is not None:
            groups = packing.num_groups(module.in_features) * module.packed.stacked.numel()
            bounds = []
            for some in pieces_of_rows(rows.stop - rows.start, groups):
                some = slice(rows.start + some.start, rows.start + some.stop)
                scales, minima = module.packed.float_scales_of(some)
                of_some = scales.abs() * largest
                bounds.append((of_some if minima is None else of_some + minima.abs()).amax(-1))
            return torch.cat(bounds, -1)
        scales = self._scales(module, rows).amax(-1)
        bounds = scales.to(packing.product_dtype or scales.dtype) * largest
        return bounds.to(packing.result_dtype or bounds.dtype)

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        packing, packed = self.packing, module.packed
        device, (num_rows, in_features) = packed.codes.device, (module.num_rows, module.in_features)

        def draw(words: Tensor) -> None:
            words.random_(-(2**15), 2**15, generator=generator)

        if packing.kind == "fp8":
            for rows in pieces_of_rows(num_rows, in_features * packed.stacked.numel()):
                size = *packed.stacked, rows.stop - rows.start, in_features
                values = torch.randn(size, device=generator.device, generator=generator).to(torch.float8_e4m3fn)
                packed.put_codes(rows.start, values.view(torch.uint8))
        else:
            fill_on_its_device(packed.codes, generator, draw)
            if packing.kind == "int" and packing.scale_words is None:
                _balance(packed.codes, packing.bits)
            if packed.high_bits is not None:
                fill_on_its_device(packed.high_bits, generator, draw)
        if packing.scale_words is not None:
            self._fill_with_even_scales(packed)
            return
        # The standard deviation of the codes.
        half = 2 ** (packing.bits - 1)
        deviation = {"fp8": 1.0, "fp4": 2.81, "int": ((half - 1) * (2 * half - 1) / 6) ** 0.5}[packing.kind]
        scale = 1.0 if packing.has_global_scale else 0.02 / deviation
        groups = packing.num_groups(in_features)
        if packing.has_exponents:
            scale = 120  # 2**-7, the nearest power
        packed.put_scales(0, num_rows, torch.full((1, groups), scale, device=device).to(packing.scale_dtype))
        if packing.has_zeros:
            packed.put_zeros(0, num_rows, torch.full((1, groups), 2 ** (packing.bits - 1), device=device))
        if packing.has_global_scale:
            packed.global_scale.fill_(deviation / 0.02 if packing.divides_global_scale else 0.02 / deviation)
        if packing.has_group_index:
            packed.group_index.copy_(torch.arange(in_features, device=device) // (packing.columns or in_features))

    def _fill_with_even_scales(self, packed: PackedWeight) -> None:
        """Give all groups one scale, and the minimum that makes the mean of the weights about 0."""
        packing, words, size = self.packing, self.packing.scale_words, (*packed.stacked, packed.num_rows)
        codes = 2**packing.bits
        scale = 0.02 / (72.0 if packing.kind == "iq4" else codes / 12**0.5)
        minimum, step, factors = scale * (codes - 1) / 2, 1, []
        groups, device = packing.num_groups(packed.in_features), packed.codes.device
        dtype = torch.float16
        if words.has_factors:
            step, dtype = 2 ** (words.bits - 2), torch.uint8 if words.has_minima else torch.int8
            blocks = *size, packed.in_features // packing.factor_columns
            factors = [torch.full(blocks, one / step, device=device).half() for one in (scale, minimum)]
            scale = minimum = step
        scales, minima = (torch.full((*size, groups), one, device=device).to(dtype) for one in (scale, minimum))
        if not words.has_minima:
            minima, factors = None, factors[:1]
        packed.put_scale_words(0, packed.num_rows, scales, minima, *factors)

    def product(
        self,
        module: nn.Module,
        x: Tensor,
        out: Tensor | None = None,
        activation: str | None = None,
        in_parts: bool = False,
    ) -> Tensor | None:
        multiply, packed, bias = module.operations.packed_linear, module.packed, module.bias
        product = multiply(x, packed, bias, activation=activation, out=out, in_parts=in_parts)
        if product is not None or self.scratch_size(module, device_of(x.device).is_fused and x.element_size() == 2):
            return product
        out = x.new_empty(len(x), module.num_rows) if out is None else out
        for some, target in zip(x.split(MAX_ROWS), out.split(MAX_ROWS), strict=True):
            multiply(some, packed, bias, out=target)
        return out

    def wide_product(self, module: nn.Module, x: Tensor) -> Tensor | None:
        if not device_of(x.device).is_fused:
            return None
        out = torch.empty(len(x), module.num_rows, dtype=torch.float32, device=x.device)
        return module.operations.packed_linear(x, module.packed, out=out)

    def scratch_size(self, module: nn.Module, has_kernels: bool) -> int:
        # The head is the largest matrix by far.
        return 0 if has_kernels and module.has_few_rows else super().scratch_size(module, has_kernels)

    def lookup(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return rows of the weight, for embeddings: [N] -> [N, in_features] in the model's dtype.

        Only these are expanded. Neither a shape nor a wait depends on the ids, so a graph may capture it.
        """
        out = torch.empty(len(ids), module.in_features, dtype=module.dtype, device=ids.device)
        self.expand_into(module, out, ids)
        return out

    def expand_into(self, module: nn.Module, out: Tensor, ids: Tensor | None = None) -> None:
        """Write the matrix to `out`, in its dtype: the rows `ids`, [N], or all rows for None."""
        if operations_of(out.device).expand(module.packed, out, ids) is not None:
            return
        for rows in pieces_of_rows(*out.shape):
            out[rows] = self.expand(module, rows if ids is None else ids[rows])

    def expand(self, module: nn.Module, rows: slice | Tensor) -> Tensor:
        """Return rows of the matrix as the reference has it: [n, in_features]. rows: from one to another, or [n]."""
        packing, packed = self.packing, module.packed
        if packing.scale_words is not None:
            return self._expand_wide(packed, rows)
        scales = self._scales(module, rows)
        dtype = scales.dtype if packing.product_dtype is None else packing.product_dtype
        codes = packed.codes_of(rows)
        if packing.kind == "fp8":
            values = codes.view(torch.float8_e4m3fn).to(dtype)
        elif packing.kind == "fp4":
            values = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.int()]
        else:
            values = codes.to(torch.int16)
            if packing.has_zeros:
                values = self._by_group(torch.sub, values, packed.zeros_of(rows), module)
            else:
                values = values - 2 ** (packing.bits - 1)
            values = values.to(dtype)
        weights = self._by_group(torch.mul, values, scales.to(dtype), module)
        return weights if packing.result_dtype is None else weights.to(packing.result_dtype)

    def _expand_wide(self, packed: PackedWeight, rows: slice | Tensor) -> Tensor:
        """As `expand`, in float32: products are exact, and a minimum is subtracted."""
        packing, codes = self.packing, packed.codes_of(rows)
        if packing.kind == "iq4":
            values = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]
        else:
            values = codes.float() - packing.zero
        scales, minima = packed.float_scales_of(rows)
        weights = values.unflatten(-1, (-1, packing.columns)) * scales.unsqueeze(-1)
        if minima is not None:
            weights -= minima.unsqueeze(-1)
        return weights.flatten(-2)

    def _scales(self, module: nn.Module, rows: slice | Tensor) -> Tensor:
        scales = module.packed.scales_of(rows)
        if self.packing.has_exponents:
            return scales.view(torch.float8_e8m0fnu).float()
        if not self.packing.has_global_scale:
            return scales
        factor, scales = module.packed.global_scale[..., rows].unsqueeze(-1), scales.float()
        return scales / factor if self.packing.divides_global_scale else scales * factor

    def _by_group(self, operation: Callable, values: Tensor, table: Tensor, module: nn.Module) -> Tensor:
        """Return operation(values, number of the value's group): [n, in_features], [n, groups] -> [n, in_features]."""
        if self.packing.has_group_index:
            return operation(values, table[:, module.packed.group_index])
        groups, columns = table.shape[1], self.packing.columns or module.in_features
        if groups * columns == module.in_features:
            return operation(values.unflatten(1, (groups, columns)), table.unsqueeze(2)).flatten(1)
        spread = table.unsqueeze(2).expand(-1, -1, columns).flatten(1)
        return operation(values, spread[:, : module.in_features])


def _balance(codes: Tensor, bits: int) -> None:
    """Make the least code, of which there is no opposite, the zero: the mean of random codes is 0 then.

    With another mean each product adds its input's sum to all its outputs, which grows from layer to layer until it is
    most of every row, and routers choose the same for all.
    """
    fields = {4: ((0x0F, 0x08), (0xF0, 0x80)), 8: ((0xFF, 0x80),)}[bits]
    for some in codes.view(torch.uint8):
        for mask, zero in fields:
            some |= ((some & mask) == 0).to(torch.uint8) * zero


def checked(values: Tensor) -> Tensor:
    """Return scales that were read; ValueError if some are NaN, infinite or negative. 0 makes weights of 0."""
    wide = values.float()
    if bool((torch.isfinite(wide) & (wide >= 0)).all()):  # the device is asked once
        return values
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("holds NaN or infinite scales: the file is corrupt, download it again")
    raise ValueError(
        "holds negative scales, which no quantiser writes: the file is corrupt, download it again, or its codes "
        "and scales were changed by hand"
    )


def temporary_bytes(num_weights: int) -> int:
    """Return the most bytes that expanding a matrix of so many weights takes on a CPU, beside weight and matrix."""
    return _BYTES_WHILE_EXPANDING * min(EXPANDED_AT_ONCE, num_weights)


def pieces_of_rows(num_rows: int, in_features: int, multiple: int = 1) -> Iterator[slice]:
    """Yield a weight's rows in pieces of `multiple` rows, or of more: then of at most `EXPANDED_AT_ONCE` weights."""
    step = multiple * max(1, EXPANDED_AT_ONCE // (multiple * in_features))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))
