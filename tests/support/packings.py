"""Packed weights of every packing, filled at random."""

from __future__ import annotations

import torch

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.gguf_blocks import BLOCKS
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.linear import Linear

HALF, FULL = torch.float16, torch.float32
PACKINGS = {
    "int4 in pairs of groups": dict(kind="int", bits=4, scale_dtype=HALF, columns=64),
    "int4 of 32": dict(kind="int", bits=4, scale_dtype=HALF, columns=32),
    "int4 with zeros": dict(kind="int", bits=4, scale_dtype=HALF, columns=128, has_zeros=True),
    "int4 in pairs with zeros": dict(kind="int", bits=4, scale_dtype=HALF, columns=64, has_zeros=True),
    "int4 with odd groups": dict(kind="int", bits=4, scale_dtype=HALF, columns=192),
    "int4 of 96": dict(kind="int", bits=4, scale_dtype=HALF, columns=96),
    "int4 by row": dict(kind="int", bits=4, scale_dtype=HALF, columns=None),
    "int4 by row with zeros": dict(kind="int", bits=4, scale_dtype=HALF, columns=None, has_zeros=True),
    "int4 with wide scales": dict(kind="int", bits=4, scale_dtype=FULL, columns=32, has_zeros=True),
    "int4 out of order": dict(kind="int", bits=4, scale_dtype=HALF, columns=32, has_zeros=True, has_group_index=True),
    "int4 of 24": dict(kind="int", bits=4, scale_dtype=HALF, columns=24),
    "int8 by row": dict(kind="int", bits=8, scale_dtype=HALF, columns=None),
    "int8 of 128": dict(kind="int", bits=8, scale_dtype=HALF, columns=128),
    "int8 with zeros": dict(kind="int", bits=8, scale_dtype=HALF, columns=64, has_zeros=True),
    "fp8 by row": dict(kind="fp8", bits=8, scale_dtype=HALF, columns=None),
    "fp8 by row with wide products": dict(kind="fp8", bits=8, scale_dtype=FULL, columns=None),
    "fp8 in blocks": dict(kind="fp8", bits=8, scale_dtype=FULL, columns=128, rows=16, product_dtype=FULL),
    "nvfp4": dict(kind="fp4", bits=4, scale_dtype=torch.float8_e4m3fn, columns=16, has_global_scale=True,
                  divides_global_scale=True, product_dtype=FULL),
    "nvfp4 multiplied": dict(kind="fp4", bits=4, scale_dtype=torch.float8_e4m3fn, columns=16, has_global_scale=True,
                             product_dtype=FULL),
    "mxfp4": dict(kind="fp4", bits=4, scale_dtype=torch.uint8, columns=32, product_dtype=torch.bfloat16),
    "int4 in blocks with zeros": dict(kind="int", bits=4, scale_dtype=HALF, columns=32, rows=24, has_zeros=True),
}  # fmt: skip


for _name, _block in BLOCKS.items():
    if _name != "MXFP4":  # which is "mxfp4"
        PACKINGS[_name] = vars(_block.packing)


class Bare(Linear):
    """A projection that has what it is given, and makes nothing."""

    cut, row_sizes, is_part = None, (), False

    def __init__(self, **fields) -> None:
        torch.nn.Module.__init__(self)
        for name, value in fields.items():
            setattr(self, name, value)


def filled(
    packing: Packing,
    num_rows: int,
    in_features: int,
    *,
    cut: int | None = None,
    seed: int = 0,
    largest: float = 1.0,
    zeros_fold: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Packed, Bare]:
    """A weight that `fill` has filled."""
    weights = Packed(packing)
    module = Bare(weights=weights, num_rows=num_rows, in_features=in_features)
    weights.allocate(module, num_rows, in_features, cut=cut, dtype=HALF, device=device)
    fill(module, torch.Generator().manual_seed(seed), largest=largest, zeros_fold=zeros_fold)
    return weights, module


def fill(module, generator: torch.Generator, *, largest: float = 1.0, zeros_fold: bool = False) -> None:
    """Every code of every kind but NaN; scales up to about `largest`, exponents of any size.

    Of scales below 1/32 in bfloat16 kernels make weights in another way than of larger ones, and in a third one where
    their products with zeros are exact: with `zeros_fold` scales have 4 bits.
    """
    packing, num_rows, in_features = module.packed.packing, module.num_rows, module.in_features
    device = module.packed.codes.device
    num_codes = 2**packing.bits
    codes = torch.randint(0, num_codes, (num_rows, in_features), generator=generator, dtype=torch.uint8)
    if packing.kind == "fp8":
        codes[(codes & 127) == 127] = 126
    codes = codes.to(device)
    module.packed.put_codes(0, codes)
    ids = torch.tensor([num_rows - 1, 0, num_rows // 2], device=device)
    assert torch.equal(module.packed.codes_of(slice(0, num_rows)), codes)
    assert torch.equal(module.packed.codes_of(ids), codes[ids])
    if packing.scale_words is not None:
        _fill_scale_words(module, generator, largest / num_codes)
        return
    groups, scale_rows = packing.num_groups(in_features), -(-num_rows // packing.rows)
    if packing.has_exponents:  # those up to 128 can be folded
        scales = torch.randint(100, 129, (scale_rows, groups), generator=generator, dtype=torch.uint8)
        scales[0, 0] = 0
        if largest >= 1:
            scales[-1, -1] = 129
    else:
        scales = (largest * (torch.rand(scale_rows, groups, generator=generator) + 0.01)).to(packing.scale_dtype)
    if zeros_fold:
        fraction, exponent = torch.frexp(scales.float())
        scales = torch.ldexp((fraction * 16).floor() / 16, exponent).to(packing.scale_dtype)
    scales = scales.to(device)
    module.packed.put_scales(0, num_rows, scales)
    if packing.has_zeros:
        zeros = torch.randint(0, 2**packing.bits, (scale_rows, groups), generator=generator, dtype=torch.uint8)
        zeros = zeros.to(device)
        module.packed.put_zeros(0, num_rows, zeros)
        of_rows = zeros.repeat_interleave(packing.rows, 0)[:num_rows]
        assert torch.equal(module.packed.zeros_of(slice(0, num_rows)), of_rows)
    if packing.has_global_scale:
        module.packed.global_scale.copy_(torch.rand(num_rows, generator=generator) + 0.5)
    if packing.has_group_index:
        module.packed.group_index.copy_(torch.randint(0, groups, (in_features,), generator=generator))
    assert packing.rows > 1 or torch.equal(module.packed.scales_of(ids).float(), scales.float()[ids])


def _fill_scale_words(module, generator: torch.Generator, largest: float) -> None:
    """All integers that are scales and minima; numbers in float16 up to about `largest`, of both signs."""
    packed, num_rows = module.packed, module.num_rows
    packing, words, device = packed.packing, packed.packing.scale_words, packed.codes.device

    def numbers(count: int, largest: float) -> torch.Tensor:
        return (largest * torch.randn(num_rows, count, generator=generator)).half().to(device)

    def integers(count: int) -> torch.Tensor:
        begin, end = (0, 2 ** min(words.bits, 6)) if words.has_minima else (-128, 128)
        found = torch.randint(begin, end, (num_rows, count), generator=generator)
        return found.to(torch.uint8 if words.has_minima else torch.int8).to(device)

    groups, factors = packing.num_groups(module.in_features), []
    if words.has_factors:
        least = largest / 2 ** min(words.bits, 6)
        factors = [numbers(module.in_features // packing.factor_columns, one) for one in (least, 8 * least)]
        values = [integers(groups), integers(groups)]
    else:
        values = [numbers(groups, largest), numbers(groups, 8 * largest)]
    if not words.has_minima:
        factors, values = factors[:1], [values[0], None]
    packed.put_scale_words(0, num_rows, *values, *factors)
    wanted = [one if one is None else one.float() for one in values]
    if factors:
        times = packing.factor_columns // packing.columns
        for place, factor in enumerate(factors):
            wanted[place] = wanted[place] * factor.float().repeat_interleave(times, 1)
    ids = torch.tensor([num_rows - 1, 0, num_rows // 2], device=device)
    for rows in (slice(0, num_rows), ids):
        for got, want in zip(packed.float_scales_of(rows), wanted, strict=True):
            assert (got is None and want is None) or torch.equal(got, want[rows])
