"""Sums in two parts in Triton's interpreter, to the bit: each part is the product of its own columns alone."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from exact_interpreter import make_interpreter_exact
from packings import PACKINGS, filled

from nanoinfer.kernels.fused import linear_parts, packed_linear, wide_linear
from nanoinfer.kernels.linear.packed_weight import PackedWeight, empty_packed
from nanoinfer.kernels.linear.packing import Packing

HALF = torch.float16


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    make_interpreter_exact(monkeypatch)


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize("num_tokens", [1, 9, 20])
@pytest.mark.parametrize("size, cut", [(256, 128), (512, 256), (576, 384), (400, 240), (56, 32), (30, 16), (320, 256)])
def test_a_part_of_a_sum_is_the_product_of_its_columns(size, cut, num_tokens):
    x, weight, bias = drawn(num_tokens, size), drawn(21, size, seed=1), drawn(21, seed=2)
    first, second = (
        wide_linear(x[:, some].contiguous(), weight[:, some].contiguous()) for some in (slice(cut), slice(cut, None))
    )
    assert torch.equal(linear_parts(x, weight, cut), torch.stack((first, second)))
    assert torch.equal(linear_parts(x, weight, cut, bias), torch.stack((first + bias.float(), second)))


CUTS = {
    (512, 256): ("int4 in pairs of groups", "int8 of 128", "fp8 in blocks", "Q4_K", "Q3_K"),
    (768, 512): ("int4 with odd groups", "int4 by row with zeros", "Q5_1", "Q6_K"),
    (576, 384): ("int4 in pairs with zeros", "int8 by row", "fp8 by row", "nvfp4", "int4 out of order"),
    (384, 208): ("int4 of 32", "mxfp4", "Q8_0", "Q5_0", "int4 of 96", "int8 with zeros"),
    (768, 384): ("Q2_K", "IQ4_XS", "Q5_K"),  # within a block of theirs
    (960, 640): ("Q4_1",),
    (2304, 1152): ("int4 with zeros",),  # of several loads each
}


@pytest.mark.parametrize("size, cut, name", [(*sizes, name) for sizes, names in CUTS.items() for name in names])
def test_packed_parts_have_the_bits_of_the_expanded_matrix(size, cut, name):
    weights, module = filled(Packing(**PACKINGS[name]), 32, size, cut=cut, largest=0.03)
    matrix, bias = weights.expand(module, slice(0, 32)).to(HALF), drawn(32, seed=2)
    for num_tokens, some_bias in ((1, bias), (20, bias), (1, None)):
        x = drawn(num_tokens, size)
        wanted = linear_parts(x, matrix, cut, some_bias)
        assert wanted.isfinite().all() and wanted[1].any()
        assert torch.equal(packed_linear(x, module.packed, some_bias, in_parts=True), wanted)


def columns_of(packed: PackedWeight, begin: int, end: int) -> PackedWeight:
    """A weight that has some columns alone: those of whole groups."""
    own, every = empty_packed(packed.packing, packed.num_rows, end - begin, "cpu"), slice(0, packed.num_rows)
    own.put_codes(0, packed.codes_of(every)[:, begin:end])
    columns = packed.packing.columns
    groups = slice(None) if columns is None else slice(begin // columns, -(-end // columns))
    own.put_scales(0, packed.num_rows, packed.scales_of(every)[:, groups])
    if packed.packing.has_zeros:
        own.put_zeros(0, packed.num_rows, packed.zeros_of(every)[:, groups])
    return own


@pytest.mark.parametrize(
    "name", ["int4 in pairs of groups", "int4 with zeros", "int8 of 128", "mxfp4", "int4 by row", "fp8 by row"]
)
@pytest.mark.parametrize("size, cut", [(512, 256), (896, 512), (384, 256)], ids=["equal", "longer", "short"])
@pytest.mark.sampled(
    "longer-int4 in pairs of groups", "longer-int4 with zeros", "short-int8 of 128", "short-mxfp4",
    "equal-int4 by row", "longer-fp8 by row",
)  # fmt: skip
def test_a_packed_weight_of_one_part_is_not_cut_again(size, cut, name):
    _, module = filled(Packing(**PACKINGS[name]), 32, size, cut=cut, largest=0.03)
    for num_tokens in (1, 20):
        x = drawn(num_tokens, size)
        wanted = packed_linear(x, module.packed, in_parts=True)
        for part, (begin, end) in zip(wanted, ((0, cut), (cut, size)), strict=True):
            own, out = columns_of(module.packed, begin, end), torch.empty(num_tokens, 32)
            assert own.cut is None
            assert torch.equal(packed_linear(x[:, begin:end].contiguous(), own, out=out), part) and part.any()
