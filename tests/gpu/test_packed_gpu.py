"""Packed weights on the GPU: the bits of the expanded matrix, for every packing and any number of rows."""

import pytest
import torch

DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("triton")

from packings import PACKINGS, filled

from nanoinfer.kernels.linear.counts import num_parts
from nanoinfer.kernels.linear.expand import expand
from nanoinfer.kernels.linear.packed import packed_linear
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.kernels.linear.rows import linear, linear_parts

HALVES = (torch.bfloat16, torch.float16)
# Rows of the weight, and columns: parts that cut blocks; blocks too large; rows that tiles do not divide.
SHAPES = [(160, 2304, (1, 9, 17, 64, 130, 300, 512)), (208, 200, (2, 33)), (2304, 192, (8, 65))]


def cases():
    for name, settings in PACKINGS.items():
        for scale_dtype in HALVES if settings["scale_dtype"] in HALVES else (settings["scale_dtype"],):
            yield name, Packing(**settings | dict(scale_dtype=scale_dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("largest", [1.0, 0.03])
@pytest.mark.parametrize("name, packing", list(cases()))
def test_any_number_of_rows_has_the_bits_of_the_expanded_matrix(name, packing, largest, dtype):
    if largest < 1 and not packing.folded[0]:
        pytest.skip("scales of any size are treated alike")
    for num_rows, size, counts in SHAPES:
        if packing.columns and size % packing.columns and packing.rows == 1:
            continue
        weights, module = filled(packing, num_rows, size, largest=largest, device=DEVICE)
        assert module.packed.can_fold == (largest < 1)
        packed, matrix = module.packed, torch.empty(num_rows, size, dtype=dtype, device=DEVICE)
        expand(packed, matrix)
        wanted = weights.expand(module, slice(0, num_rows)).to(dtype)
        assert torch.equal(matrix.view(torch.int16), wanted.view(torch.int16)), (name, size)
        # Of a size that no sum overflows with, which would be NaN and so equal to nothing.
        x = torch.randn(512, size, device=DEVICE).to(dtype) / matrix.float().abs().max().clamp(min=1e-3).to(dtype)
        bias, parts = torch.randn(num_rows, device=DEVICE).to(dtype), num_parts(size)
        want, gated = linear(x, matrix, bias), linear(x, matrix, activation="silu")
        sums = linear_parts(x, matrix, parts) if parts > 1 else None
        assert bool(want.isfinite().all())
        for count in counts:
            assert torch.equal(packed_linear(x[:count], packed, bias), want[:count]), (name, size, count)
            got = packed_linear(x[:count], packed, activation="silu")
            assert torch.equal(got, gated[:count]), (name, size, count, "gated")
            if parts > 1:
                assert torch.equal(packed_linear(x[:count], packed, num_parts=parts), sums[:, :count]), (name, size)
