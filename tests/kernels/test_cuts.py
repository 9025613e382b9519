"""Where sums are cut in two: by the whole weight alone, and into two parts that are not empty."""

import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer.kernels.linear.cuts import columns_cut, divided, heads_cut
from nanoinfer.layers.formats.gguf_blocks import BLOCKS
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.mlp import MLP


@pytest.mark.parametrize("block", [1, 16, 24, 32, 96, 128, 256])
def test_columns_are_halved_and_no_part_is_empty(block):
    for size in range(2, 3000):
        cut = columns_cut(size, block)
        assert 0 < cut < size <= 2 * cut
        if size >= 512:
            assert cut % 256 == 0 and 0 <= cut - size / 2 < 256
        elif size > 16:
            assert cut % 16 == 0


def test_the_cut_of_a_few_columns_is_at_a_block():
    found = [columns_cut(160, block) for block in (1, 16, 32, 64, 96, 128, 256)]
    assert found == [80, 80, 96, 128, 96, 128, 80], "of one block alone it is within"
    assert [columns_cut(size) for size in (9728, 11008, 8960, 14336, 1536)] == [4864, 5632, 4608, 7168, 768]


@pytest.mark.parametrize(
    "heads, first",
    [((32, 8), (16, 4)), ((9, 3), (6, 2)), ((4, 1), (2, 1)), ((7, 1), (4, 1)), ((14, 2), (7, 1)), ((15, 5), (9, 3))],
)
def test_heads_are_halved_by_kv_heads(heads, first):
    assert heads_cut(*heads) == first


def test_what_is_divided_has_no_empty_part():
    assert divided(10, 4) == (4, 6) and divided(10, 10) == (10,) and divided(0, 0) == (0,)


@pytest.mark.parametrize("name, cut", [("Q4_K", 128), ("Q8_0", 128), ("MXFP4", 128)])
def test_a_format_says_which_columns_belong_together(name, cut):
    """Of 256 columns, which are one block of Q4_K: both parts have some of it."""
    mlp = MLP(64, 256, "silu", bias=False, dtype=torch.float32, device="meta", formats=Packed(BLOCKS[name].packing))
    assert mlp.down_proj.cut == mlp.down_proj.packed.cut == cut and mlp.up_proj.row_sizes == (cut, 256 - cut)
    small = MLP(64, 160, "silu", bias=False, dtype=torch.float32, device="meta", formats=Packed(BLOCKS["Q8_0"].packing))
    assert small.down_proj.cut == 96


@pytest.mark.parametrize("heads, sizes", [((6, 3), (64, 32, 32, 16, 32, 16)), ((4, 1), (32, 32, 16, 16))])
def test_rows_of_q_k_and_v_are_those_of_the_heads(heads, sizes, tmp_path):
    from loading import loaded

    num_heads, num_kv_heads = heads
    path = make_checkpoint("qwen2", tmp_path, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=100)
    layer = loaded(path).layers[0]
    assert layer.self_attn.qkv_proj.row_sizes == sizes and layer.self_attn.o_proj.cut == sizes[0]
    assert layer.mlp.gate_up_proj.row_sizes == (64, 36, 64, 36) and layer.mlp.down_proj.cut == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_projection_is_the_sum_of_its_parts(has_bias, dtype):
    """Each by itself, of weights that hold nothing else; the bias in the first."""
    module = Linear(96, 40, cut=64, bias=has_bias, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    module.fill_with_noise(generator)
    for num_rows in (1, 5, 70):
        x = torch.randn(num_rows, 96, generator=generator).to(dtype)
        parts = [module.operations.wide_linear(x[:, some].clone(), module.weight[:, some].clone())
                 for some in (slice(64), slice(64, None))]  # fmt: skip
        if has_bias:
            parts[0] += module.bias.float()
        assert torch.equal(module.parts(x).sum(0), parts[0] + parts[1])
        assert torch.equal(module(x), (parts[0] + parts[1]).to(dtype)) and parts[1].any()
