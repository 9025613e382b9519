"""The layer kernels in Triton's interpreter, on small shapes."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from layer_kernel_cases import (
    check_act_and_mul,
    check_norm_rope_store,
    check_rms_norm,
    check_rows_linear,
    check_vector_linear,
)

# Not bfloat16: the interpreter cuts it off where a GPU rounds. float16 shows the places of rounding as well.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [48, 256])
def test_rms_norm(size, offset, dtype):
    check_rms_norm(size, offset, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("with_norm, offset", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 80), (12, 4, 48)])
def test_norm_rotation_and_store(heads, with_norm, offset, dtype):
    check_norm_rope_store(heads, with_norm, offset, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("with_norm", [False, True])
def test_what_is_beyond_the_range_of_float8_is_stored_as_its_largest(with_norm, dtype):
    check_norm_rope_store((4, 2, 16), with_norm, False, dtype, "cpu", kv_dtype=torch.float8_e4m3fn)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [56, 1100])
def test_activation(size, activation, dtype):
    check_act_and_mul(size, activation, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size, num_rows, num_tokens", [(64, 21, 1), (192, 64, 7), (128, 32, 21), (256, 200, 70)])
def test_few_rows_through_a_projection(size, num_rows, num_tokens, activation, dtype):
    check_rows_linear(size, num_rows, num_tokens, activation, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize(
    "size, num_rows, offset", [(48, 10, False), (600, 21, True), (1024, 4, False), (4608, 3, True)]
)
def test_one_row_added_to_the_sum(size, num_rows, offset, dtype):
    check_vector_linear(size, num_rows, offset, dtype, "cpu")


@pytest.mark.parametrize("num_tokens", [33, 64, 65, 128, 200, 256])
def test_splits_of_columns_are_whole_tiles_and_no_more_than_there_are_cores_for(num_tokens):
    from nanoinfer.kernels import tile_linear

    for size in (64, 192, 1024, 1152, 3072, 9728):
        for num_rows in (21, 1024, 2560, 5120):
            splits = tile_linear.tile_splits(size, num_rows, num_tokens)
            block_n, block_k, _ = tile_linear._tiles(num_tokens, num_rows, gated=False)
            programs = -(-num_tokens // tile_linear.BLOCK_M) * -(-num_rows // block_n)
            assert splits == 1 or (size % (splits * block_k) == 0 and splits * programs <= tile_linear.PROGRAMS)
    assert tile_linear.tile_splits(3072, 1024, 64) == 4, "few programs share the columns"
