"""Which products of a model the library may compute: those that it sums in our order, tested on the GPU at hand.

For many rows the library's products are faster than ours. For most shapes they have the same bits, because the library,
too, sums K in ascending order, unless it cuts K into parts or takes a kernel for odd sizes. Which kernel it takes
depends on the shape, the number of rows, the GPU and the library's version. So the library is tested when an engine
starts, at each number of rows that it will be called with (`counts.padded_rows`). Where one bit differs, our own tiles
compute the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.linear.counts import MAX_ROWS, padded_counts
from nanoinfer.layers.linear import Head, Linear
from nanoinfer.models.decoder import Decoder


def check_products(model: Decoder, max_rows: int) -> dict[str, list[int]]:
    """Compare the library's products with ours, to the bit, and tell each `Linear` at which counts it may use them.

    Args:
        max_rows: the most rows that a step computes.

    Returns:
        For each shape of weights, such as "4096x1024" ([num_rows, size]), the numbers of rows at which bits differ.
    """
    counts, differing = padded_counts(max_rows), {}
    for (num_rows, size, *_), modules in _by_shape(model).items():
        model.streamed.bring(modules[0])
        agreeing = library_counts(modules[0], counts)
        for module in modules:
            module.library_counts = agreeing
        shape = f"{num_rows}x{size}"
        differing[shape] = sorted((set(counts) - agreeing).union(differing.get(shape, ())))
    return differing


def run_ours(model: Decoder) -> None:
    """Compute with our kernels what `check_products` will compute, so that these kernels are compiled."""
    for modules in _by_shape(model).values():
        weight = modules[0].weights.matrix(modules[0])
        in_own_tiles(modules[0], weight, weight.new_zeros(MAX_ROWS, weight.shape[1]))


def _by_shape(model: Decoder) -> dict[tuple[int, int, int | None, bool, bool], list[Linear]]:
    """Return the projections that the library may compute, by rows and columns of the weight, its cut, whether it is
    one part of a sum and whether it has a bias.

    In float32 there are none.
    """
    groups: dict[tuple[int, int, int | None, bool, bool], list[Linear]] = {}
    if model.spec.dtype.itemsize != 2:
        return groups
    for module in model.modules():
        if not isinstance(module, Linear) or isinstance(module, Head):
            continue
        if device_of(next(module.parameters()).device).is_fused:
            kind = module.num_rows, module.in_features, module.cut, module.is_part, module.bias is not None
            groups.setdefault(kind, []).append(module)
    return groups


def library_counts(module: Linear, counts: list[int]) -> frozenset[int]:
    """Return the `counts` of rows at which the library gives the bits of our kernels for this projection."""
    from nanoinfer.kernels.linear.rows import library_sum  # triton comes with CUDA builds of torch only

    weight = module.weights.matrix(module)
    generator = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(MAX_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device, generator=generator)

    def library(x: Tensor) -> Tensor:
        if module.is_part:  # the bias is added behind it
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        if module.cut is None:
            return torch.nn.functional.linear(x, weight, module.bias)
        return library_sum(x, weight, module.cut, module.bias)

    return agreeing_counts(rows, lambda x: in_own_tiles(module, weight, x), library, counts)


def in_own_tiles(module: Linear, weight: Tensor, x: Tensor) -> Tensor:
    """Compute x @ weight.T, the projection's own bias added, with our kernels; parts in the order of `rms_norm`."""
    from nanoinfer.kernels.linear import rows as kernels  # triton comes with CUDA builds of torch only

    if module.is_part:
        return kernels.wide_linear(x, weight)
    if module.cut is None:
        return kernels.linear(x, weight, module.bias)
    return reduce(
        torch.add, kernels.linear_parts(x, weight, module.cut, module.bias)
    )  # in the order in which `rms_norm` adds them up


def agreeing_counts(
    rows: Tensor, ours: Callable[[Tensor], Tensor], library: Callable[[Tensor], Tensor], counts: list[int]
) -> frozenset[int]:
    """Return the `counts` at which `ours` and `library` give the same bits.

    Args:
        rows: [n, size], repeated as often as a count asks for; `ours` computes them once.
    """
    if not counts:
        return frozenset()
    want = ours(rows)
    repeated = rows.repeat(-(-counts[-1] // len(rows)), 1)
    differs = []
    for count in counts:
        got = library(repeated[:count])
        flags = [(part != want[: len(part)]).any() for part in got.split(len(rows))]
        differs.append(torch.stack(flags).any())
        del got, flags
    return frozenset(
        count for count, is_other in zip(counts, torch.stack(differs).tolist(), strict=True) if not is_other
    )
