"""Rows of a table in host memory: the kernel under the interpreter beside torch."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.linear.gather import copy_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 2048, 2880])
def test_rows_are_those_of_the_table(size, dtype):
    table = torch.randn(37, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    for ids in ([], [36], [0, 5, 5, 36, 1]):
        ids = torch.tensor(ids, dtype=torch.int64)
        wanted = reference.gather_rows(table, ids)
        assert torch.equal(copy_rows(table, ids), wanted) and torch.equal(fused.gather_rows(table, ids), wanted)
