"""Packed weights on the GPU: the bits of the expanded matrix, for every packing and any number of rows."""

from types import SimpleNamespace

import pytest
import torch

DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("triton")

from packings import PACKINGS, Bare, filled

from nanoinfer.kernels import fused
from nanoinfer.kernels.linear.cuts import columns_cut
from nanoinfer.kernels.linear.expand import expand
from nanoinfer.kernels.linear.launches import Tiles
from nanoinfer.kernels.linear.packed import packed_linear
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.kernels.linear.rows import linear, linear_parts
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.parted import Parted

# Rows of the weight, columns, and rows of x: parts that cut blocks; blocks too large; rows that tiles do not divide.
SHAPES = [(160, 2304, (1, 9, 17, 64, 100, 130, 512)), (208, 200, (2, 33)), (2304, 192, (8, 65))]


def cases():
    """Names, packings, the model's dtype and about the largest scale."""
    bf16, half = torch.bfloat16, torch.float16
    for name, settings in PACKINGS.items():
        is_16_bit = settings["scale_dtype"] == half
        packing = Packing(**settings | dict(scale_dtype=bf16) if is_16_bit else settings)
        if packing.scale_words is not None:
            yield from ((name, packing, dtype, largest) for dtype, largest in ((bf16, 8.0), (bf16, 0.03), (half, 0.03)))
            continue
        yield name, packing, bf16, 1.0
        if packing.folded[0]:
            yield name, packing, bf16, 0.03
        if name in ("int4 with zeros", "int4 in pairs with zeros", "int8 by row", "fp8 by row", "int4 of 32", "nvfp4"):
            yield name, Packing(**settings), half, 1.0
            yield name, packing, half, 0.03
            yield name, Packing(**settings), bf16, 1.0


@pytest.mark.parametrize("name, packing, dtype, largest", list(cases()))
def test_any_number_of_rows_has_the_bits_of_the_expanded_matrix(name, packing, dtype, largest):
    for num_rows, size, counts in SHAPES:
        columns = packing.factor_columns or packing.columns
        if columns and size % columns and packing.rows == 1:
            continue
        cut = 16 * (size // 40) if num_rows == 160 else columns_cut(size)  # within blocks, and not
        weights, module = filled(packing, num_rows, size, cut=cut, largest=largest, device=DEVICE)
        is_folded = packing.folded[0] > 0 or packing.scale_words is not None
        assert module.packed.folding.scales == (is_folded and (largest < 1 or packing.kind == "fp8"))
        packed, matrix = module.packed, torch.empty(num_rows, size, dtype=dtype, device=DEVICE)
        expand(packed, matrix)
        wanted = weights.expand(module, slice(0, num_rows)).to(dtype)
        assert torch.equal(matrix.view(torch.int16), wanted.view(torch.int16)), (name, size)
        wide = expand(packed, torch.empty(num_rows, size, device=DEVICE))  # as a model in float32 has it
        assert torch.equal(wide, weights.expand(module, slice(0, num_rows)).float()), (name, size)
        # Of a size that no sum overflows with, which would be NaN and so equal to nothing.
        x = torch.randn(512, size, device=DEVICE).to(dtype) / matrix.float().abs().max().clamp(min=1e-3).to(dtype)
        bias = torch.randn(num_rows, device=DEVICE).to(dtype)
        want, gated = linear(x, matrix, bias), linear(x, matrix, activation="silu")
        sums = linear_parts(x, matrix, cut, bias)
        assert bool(want.isfinite().all())
        for count in counts:
            assert torch.equal(packed_linear(x[:count], packed, bias), want[:count]), (name, size, count)
            got = packed_linear(x[:count], packed, activation="silu")
            assert torch.equal(got, gated[:count]), (name, size, count, "gated")
            got = packed_linear(x[:count], packed, bias, in_parts=True)
            assert torch.equal(got, sums[:, :count]), (name, size, count, "parts")


@pytest.mark.parametrize(
    "name", ["int4 in pairs of groups", "int4 in pairs with zeros", "int4 with zeros", "int8 by row", "int8 of 128",
             "fp8 by row"],
)  # fmt: skip
def test_tiles_of_more_programs_than_cores_have_the_same_bits(name):
    """Fewer programs load more steps ahead, which is another kernel."""
    packing = Packing(**PACKINGS[name] | dict(scale_dtype=torch.bfloat16))
    _, module = filled(packing, 20_000, 512, largest=0.03, device=DEVICE)
    matrix = expand(module.packed, torch.empty(20_000, 512, dtype=torch.bfloat16, device=DEVICE))
    x = torch.randn(512, 512, device=DEVICE).bfloat16()
    want, gated = linear(x, matrix), linear(x, matrix, activation="silu")
    for count in (9, 17, 64, 100, 200, 512):
        assert torch.equal(packed_linear(x[:count], module.packed), want[:count]), count
        assert torch.equal(packed_linear(x[:count], module.packed, activation="silu"), gated[:count]), count


@pytest.mark.parametrize("zeros_fold", [False, True])
@pytest.mark.parametrize("name", ["int4 with zeros", "int4 in pairs with zeros", "int4 by row with zeros"])
def test_zeros_that_are_folded_and_others_have_the_bits_of_the_expanded_matrix(name, zeros_fold):
    packing, size = Packing(**PACKINGS[name] | dict(scale_dtype=torch.bfloat16)), 512
    weights, module = filled(packing, 160, size, largest=0.03, zeros_fold=zeros_fold, device=DEVICE)
    assert module.packed.folding.scales and module.packed.folding.zeros == zeros_fold
    wanted = weights.expand(module, slice(0, 160)).bfloat16()
    matrix = expand(module.packed, torch.empty(160, size, dtype=torch.bfloat16, device=DEVICE))
    assert torch.equal(matrix.view(torch.int16), wanted.view(torch.int16))
    x = torch.randn(512, size, device=DEVICE).bfloat16()
    want = linear(x, wanted)
    for count in (1, 9, 17, 64, 100, 512):
        assert torch.equal(packed_linear(x[:count], module.packed), want[:count]), count


@pytest.mark.parametrize("name", ["int4 in pairs of groups", "int4 in pairs with zeros", "int4 of 32"])
def test_larger_tiles_have_the_same_bits(name, monkeypatch):
    settings = PACKINGS[name] | dict(scale_dtype=torch.bfloat16)
    _, module = filled(Packing(**settings), 160, 384, largest=0.03, device=DEVICE)
    x = torch.randn(8, 384, device=DEVICE).bfloat16()
    wanted = packed_linear(x, module.packed, activation="silu")
    larger = Tiles(8, 64, 256, 4, 3)
    monkeypatch.setattr("nanoinfer.kernels.linear.packed.tiles_of", lambda *given, **step: larger)
    for count in (1, 8):
        assert torch.equal(packed_linear(x[:count], module.packed, activation="silu"), wanted[:count])


def test_parts_by_themselves_have_the_bits_of_the_matrix_of_all():
    names = ("int4 with zeros", "int4 out of order", "fp8 in blocks")
    found = [filled(Packing(**PACKINGS[name]), 160, 384, largest=0.03, device=DEVICE) for name in names]
    found.append((DENSE, SimpleNamespace(weight=torch.randn(48, 384, device=DEVICE).bfloat16() / 20)))
    weights = Parted([one for one, _ in found], [160, 160, 160, 48])
    module = Bare(weights=weights, num_rows=528, in_features=384, held=found)
    module.scratch = torch.empty(528 * 384, dtype=torch.bfloat16, device=DEVICE)
    module.operations, module.library_counts = fused, frozenset()
    matrix = weights.matrix(module).clone()
    x = torch.randn(512, 384, device=DEVICE).bfloat16()
    for bias in (None, torch.randn(528, device=DEVICE).bfloat16()):
        module.bias = bias
        want, gated = linear(x, matrix, bias), linear(x, matrix, bias, activation="silu")
        for count in (1, 7, 33, 512):
            assert torch.equal(module(x[:count]), want[:count]), count
            assert torch.equal(module(x[:count], activation="silu"), gated[:count]), count
