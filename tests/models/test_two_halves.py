"""A model in two halves, each with its columns, heads and experts: the engine's bits in all products and logits."""

from collections import Counter

import pytest
import torch
from engines import make_engine, run, some_params
from exact_interpreter import make_interpreter_exact
from gguf_models import write_gguf
from halves import computed_in_halves
from quantised import CASES, write
from tiny_models import ALL_FAMILIES, DELTA, make_checkpoint, random_tokens

from nanoinfer.common import exact
from nanoinfer.devices.cpu import CpuDevice

DTYPES = ("float32", "bfloat16", "float16")
SHARED = ("glm4_moe", "qwen3_5_moe", "qwen3_next")
SPARSE = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_5_moe", "qwen3_next")
SHAPES = {
    "one KV head": dict(num_heads=4, num_kv_heads=1, head_dim=32),
    "odd": dict(num_heads=6, num_kv_heads=3, intermediate_size=600),
}


def check(path, dtype: str, lengths: tuple[int, ...] = (43, 9), **options) -> Counter:
    engine = make_engine(path, dtype=dtype, enforce_eager=True, block_size=32, enable_prefix_caching=False, **options)
    prompts = [random_tokens(length) for length in lengths]
    params = some_params(len(prompts), 2, logprobs=3, prompt_logprobs=2)
    wanted = run(engine, prompts, params)
    with computed_in_halves(engine) as counts:
        assert run(engine, prompts, params) == wanted
    engine.close()
    assert all(counts.values()), "a second half is empty"
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.sampled(*(f"{family}-{DTYPES[number % 3]}" for number, family in enumerate(ALL_FAMILIES)))
def test_a_family_in_halves_has_the_bits_of_the_whole(family, dtype, tmp_path):
    counts = check(make_checkpoint(family, tmp_path, num_layers=2), dtype)
    up = {"nemotron": "up_proj", "starcoder2": "up_proj"}.get(family, "gate_up_proj")
    names = {"heads", "qkv_proj", "o_proj", "head"} | ({up, "down_proj"} if family not in SPARSE else set())
    names |= {"experts"} if family in (*SPARSE, *SHARED, "gemma4_moe", "lfm2_moe") else set()
    names |= {"in_proj", "out_proj"} if family.startswith("lfm2") or family in DELTA else set()
    assert set(counts) == names | ({"shared"} if family in SHARED else set())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "olmo2", "starcoder2", "gpt_oss"])
@pytest.mark.sampled(
    "llama-odd-bfloat16", "gemma3-one KV head-float16", "olmo2-odd-float32", "starcoder2-one KV head-bfloat16",
    "gpt_oss-odd-bfloat16", "gpt_oss-one KV head-float32",
)  # fmt: skip
def test_any_shape_in_halves_has_the_bits_of_the_whole(family, shape, dtype, tmp_path):
    """A single KV head, which both have; an odd number of them; biases of the sums in parts."""
    fields = SHAPES[shape] | (dict(attention_bias=True, mlp_bias=True) if family == "llama" else {})
    check(make_checkpoint(family, tmp_path, num_layers=2, **fields), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_key_heads, num_value_heads", [(1, 1), (1, 3), (3, 3), (3, 6)])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.sampled("qwen3_5-1-1-float32", "qwen3_5-1-3-bfloat16", "qwen3_next-3-6-float16")
def test_any_heads_of_values_in_halves_have_the_bits_of_the_whole(
    family, num_key_heads, num_value_heads, dtype, tmp_path
):
    heads = dict(linear_num_key_heads=num_key_heads, linear_num_value_heads=num_value_heads)
    check(make_checkpoint(family, tmp_path, num_layers=2, **SHAPES["odd"], **heads), dtype)


@pytest.mark.parametrize("num_key_heads, num_value_heads", [(1, 3), (2, 4), (3, 6)])
@pytest.mark.sampled("3-6")
def test_so_have_heads_of_values_in_the_order_of_files(num_key_heads, num_value_heads, tmp_path):
    """Each half has half of them, and all key heads."""
    pytest.importorskip("gguf", reason="it writes the file")
    heads = dict(linear_num_key_heads=num_key_heads, linear_num_value_heads=num_value_heads)
    directory = make_checkpoint("qwen3_5", tmp_path / "hf", num_layers=2, **SHAPES["odd"], **heads)
    check(write_gguf("qwen3_5", directory, tmp_path / "model.gguf"), "float32")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_moe", "starcoder2", "gpt_oss", "olmo2", "lfm2", *DELTA])
@pytest.mark.sampled("llama", "gemma4_moe", "lfm2", "qwen3_5_moe")
def test_so_it_has_with_the_kernels_of_a_gpu(family, tmp_path, monkeypatch):
    """In the interpreter, whose products add their columns one by one."""
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    make_interpreter_exact(monkeypatch)
    monkeypatch.setattr(CpuDevice, "operations", "nanoinfer.kernels.fused")
    monkeypatch.setattr(CpuDevice, "is_fused", True)
    fields = dict(attention_bias=True, mlp_bias=True) if family == "llama" else {}
    path = make_checkpoint(family, tmp_path, num_layers=2, num_heads=6, num_kv_heads=3, **fields)
    check(path, "float16", lengths=(17,), attention_backend="triton")


@pytest.mark.parametrize("family", ["llama", "gemma3", "nemotron", "glm4_moe"])
def test_so_it_has_where_a_library_chooses_the_order_of_sums_by_the_weight(family, tmp_path, monkeypatch):
    """By the shape of the weight, by how its rows lie, and by where it begins."""
    library = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        begin = len(weight) + 3 * (weight.stride(0) - weight.shape[1]) + 5 * (weight.data_ptr() % 64 > 0)
        return library(x.roll(begin, 1), weight.roll(begin, 1), bias)

    monkeypatch.setattr(exact.F, "linear", linear)
    for size, heads, dtype in ((64, 4, "float32"), (75, 5, "bfloat16")):  # of 75 columns, heads begin anywhere
        fields = dict(hidden_size=size, num_heads=heads, num_kv_heads=heads, num_layers=2)
        check(make_checkpoint(family, tmp_path / dtype, **fields), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled("ct-mixed", "ct-nvfp4", "gptq-int4-act-order", "awq", "fp8-blocks", "gptq-int8-rows")
def test_a_format_in_halves_has_the_bits_of_the_whole(name, tmp_path):
    packed, _ = write(tmp_path, CASES[name]())
    for dtype in DTYPES[:2]:
        check(packed, dtype)


@pytest.mark.parametrize("block_type", ["Q8_0", "Q5_1"])
@pytest.mark.sampled("Q5_1")
def test_a_block_that_both_halves_have_some_of_changes_no_bit(block_type, tmp_path):
    """Two heads of 16 columns, which are one block of the output projection; three blocks of the other."""
    pytest.importorskip("gguf", reason="it writes the file")
    fields = dict(num_heads=2, num_kv_heads=2, hidden_size=64, intermediate_size=96, num_layers=1)
    directory = make_checkpoint("qwen3", tmp_path / "hf", **fields)
    path = write_gguf("qwen3", directory, tmp_path / "model.gguf", type_of=lambda name: block_type)
    check(path, "bfloat16")
