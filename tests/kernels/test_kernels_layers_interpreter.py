"""The layer kernels in Triton's interpreter, on small shapes."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from layer_kernel_cases import (
    HEAD_CASES,
    RMS_NORMS,
    check_act,
    check_act_and_mul,
    check_each_token_alone,
    check_factor_of_a_sum,
    check_fresh_sum_and_factor,
    check_joined_norm,
    check_layer_norm,
    check_linear,
    check_linear_parts,
    check_norm_rope_store,
    check_rms_norm,
    check_scale_of_a_sum,
    check_two_norms,
)

from nanoinfer.kernels import fused, reference

# Not bfloat16: the interpreter cuts it off where a GPU rounds. float16 shows the places of rounding as well.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("variant", RMS_NORMS, ids=str)
@pytest.mark.parametrize("size", [48, 256])
def test_rms_norm(size, variant, dtype):
    check_rms_norm(size, variant, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("variant", RMS_NORMS, ids=str)
def test_a_sum_is_scaled_before_its_norm(variant, dtype):
    check_scale_of_a_sum(48, variant, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("variant", RMS_NORMS, ids=str)
def test_a_norm_is_written_where_nothing_was_and_multiplied(variant, dtype):
    check_fresh_sum_and_factor(48, variant, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("variant", RMS_NORMS, ids=str)
def test_two_sums_are_normed_and_joined_and_two_norms_made_at_once(variant, dtype):
    check_joined_norm(48, variant, dtype, "cpu")
    check_two_norms(48, variant, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size, num_rows", [(48, 1), (48, 5), (256, 17), (72, 33)])
def test_layer_norm(size, num_rows, offset, dtype):
    check_layer_norm(size, offset, num_rows, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 5, 17])
def test_a_factor_of_what_is_added(num_rows, dtype):
    check_factor_of_a_sum(num_rows, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("num_rows, size", [(1, 56), (7, 300), (33, 80)])
def test_activation_without_a_gate(num_rows, size, activation, dtype):
    check_act(num_rows, size, activation, dtype, "cpu")


@pytest.mark.parametrize("operations", [fused, reference])
def test_a_norm_lies_where_it_is_asked_for(operations):
    x, other, weight = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    out, before = torch.empty(3, 48), x.clone()
    wanted = operations.rms_norm(x.clone(), weight, 1e-6, offset=False, other=other)
    assert operations.rms_norm(x, weight, 1e-6, offset=False, other=other, out=out) is out
    assert torch.equal(out, wanted) and torch.equal(x, before + other)


@DTYPES
@pytest.mark.parametrize("case", ["plain", "norm", "norm with offset"])
@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 80), (12, 4, 48)])
def test_norm_rotation_and_store(heads, case, dtype):
    check_norm_rope_store(heads, case, dtype, "cpu")


@pytest.mark.parametrize("case", HEAD_CASES)
def test_norm_rotation_and_store_of_every_kind(case):
    check_norm_rope_store((3, 2, 48), case, torch.float16, "cpu")
    check_each_token_alone((3, 2, 48), case, torch.float16, "cpu", num_tokens=4)


@DTYPES
@pytest.mark.parametrize("case", ["plain", "norm", "part"])
def test_what_is_beyond_the_range_of_float8_is_stored_as_its_largest(case, dtype):
    check_norm_rope_store((4, 2, 16), case, dtype, "cpu", kv_dtype=torch.float8_e4m3fn)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [56, 1100])
def test_activation(size, activation, dtype):
    check_act_and_mul(size, activation, dtype, "cpu")


PRODUCTS = [(64, 21, 1), (192, 64, 7), (33, 40, 12), (57, 32, 21), (128, 32, 21), (256, 200, 70), (100, 70, 40)]
PRODUCT_KINDS = [(None, torch.float32), ("silu", torch.float16), ("gelu_pytorch_tanh", torch.float32)]
PRODUCT_KINDS += [(None, torch.float16), ("silu", torch.float32), ("gelu_pytorch_tanh", torch.float16)]


@DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size, num_rows, num_tokens", PRODUCTS)
@pytest.mark.sampled(
    *[  # each size with both dtypes and all activations, each kind with three sizes or four
        "-".join(map(str, (*sizes, *kind)))
        for i, sizes in enumerate(PRODUCTS)
        for kind in PRODUCT_KINDS[3 * (i % 2) :][:3]
    ]
)
def test_a_product(size, num_rows, num_tokens, activation, dtype):
    check_linear(size, num_rows, num_tokens, activation, dtype, "cpu")


@pytest.mark.parametrize("num_tokens", [1, 12, 40])
@pytest.mark.parametrize(
    "size, num_rows, cut, has_bias",
    [(256, 21, 128, False), (576, 70, 384, True), (512, 16, 256, True), (56, 33, 32, True), (400, 20, 240, False)],
)  # fmt: skip
def test_a_sum_in_parts(size, num_rows, cut, has_bias, num_tokens):
    check_linear_parts(size, num_rows, num_tokens, cut, has_bias, torch.float16, "cpu")
