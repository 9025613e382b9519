"""The layer kernels on a GPU, against the torch code."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [48, 1024, 2560, 4096, 5376])
def test_rms_norm(size, offset, dtype):
    from layer_kernel_cases import check_rms_norm

    check_rms_norm(size, offset, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("with_norm, offset", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 80), (32, 8, 128), (16, 8, 256), (3, 3, 48)])
def test_norm_rotation_and_store(heads, with_norm, offset, dtype):
    from layer_kernel_cases import check_norm_rope_store

    check_norm_rope_store(heads, with_norm, offset, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [56, 9728])
def test_activation(size, activation, dtype):
    from layer_kernel_cases import check_act_and_mul

    check_act_and_mul(size, activation, dtype, "cuda")


HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF_DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 32])
@pytest.mark.parametrize("size, num_rows", [(64, 21), (2560, 9728), (4096, 2560), (1152, 1000)])
def test_few_rows_through_a_projection(size, num_rows, num_tokens, activation, dtype):
    from layer_kernel_cases import check_rows_linear

    check_rows_linear(size, num_rows, num_tokens, activation, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize(
    "size, num_rows, offset", [(48, 10, False), (4096, 2560, True), (9728, 2560, False), (600, 21, True)]
)
def test_one_row_added_to_the_sum(size, num_rows, offset, dtype):
    from layer_kernel_cases import check_vector_linear

    check_vector_linear(size, num_rows, offset, dtype, "cuda")


@HALF_DTYPES
@pytest.mark.parametrize("scale", [1.0, 4000.0])
@pytest.mark.parametrize("hidden_size", [480, 2560])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_a_norm_between_two_projections_is_whole(num_rows, hidden_size, scale, dtype):
    """Whoever leaves the division by rms(x) to the next projection must know that it divides, and that x fits the type."""
    from nanoinfer.layers import Linear, RMSNorm

    options = dict(dtype=dtype, device="cuda")
    first, second = Linear(1024, hidden_size, bias=False, **options), Linear(hidden_size, 192, bias=False, **options)
    norm = RMSNorm(hidden_size, 1e-6, **options)
    for weight in (first.weight, second.weight):
        weight.data = torch.randn_like(weight) * weight.shape[1] ** -0.5
    norm.weight.data = torch.full_like(norm.weight, 20.0)
    x, y = torch.randn(num_rows, hidden_size, **options) * scale, torch.randn(num_rows, 1024, **options)
    plain, total = x + y @ first.weight.T, x.clone()
    got = second.of(first.added_to(total, y, norm))
    want = RMSNorm.norm(plain.float(), norm.weight.float(), 1e-6) @ second.weight.float().T
    assert torch.allclose(total.float(), plain.float(), rtol=2e-2, atol=2e-2 * scale)
    assert torch.allclose(got.float(), want, rtol=5e-2, atol=1.0), (got.float() - want).abs().max()
