"""A model in two halves on a GPU: the engine's bits in every product and the logits, as in `tests/models`."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("triton")

from engines import make_engine, run, some_params
from halves import computed_in_halves
from quantised import CASES, write
from tiny_models import make_checkpoint, random_tokens

from nanoinfer.kernels.linear.counts import MAX_ROWS

LENGTHS = (43, MAX_ROWS + 200)
"""Prompts whose products are our kernels', and the library's where it has their bits."""


def check(path, dtype: str) -> None:
    engine = make_engine(
        path, dtype=dtype, device="cuda", gpu_memory_limit="4GiB", max_model_len=1024, max_num_batched_tokens=1024,
        ring_slot_bytes=2**20, block_size=64, num_gpu_blocks_override=64, enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = some_params(1, 3, logprobs=3)
    for length in LENGTHS:
        wanted = run(engine, [random_tokens(length)], params)
        with computed_in_halves(engine) as counts:
            assert run(engine, [random_tokens(length)], params) == wanted
        assert all(counts.values()), "a second half is empty"
    engine.close()


EVEN = dict(num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=256, intermediate_size=1024)
ODD = dict(num_heads=6, num_kv_heads=3, head_dim=48, hidden_size=192, intermediate_size=1136)


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2", "glm4", "starcoder2", "qwen3_moe", "gpt_oss"])
def test_a_family_in_halves_has_the_bits_of_the_whole(family, dtype, sizes, tmp_path):
    """Sums of equal parts, and of unequal ones that tiles do not divide; biases, and norms before the residual."""
    fields = dict(attention_bias=True, mlp_bias=True) if family == "llama" else {}
    check(make_checkpoint(family, tmp_path, num_layers=2, **sizes, **fields), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_shared_expert_in_halves_has_the_bits_of_the_whole(dtype, tmp_path):
    sizes = dict(head_dim=64, hidden_size=256, intermediate_size=640, moe_intermediate_size=320, num_layers=2)
    check(make_checkpoint("glm4_moe", tmp_path, **sizes), dtype)


@pytest.mark.parametrize(
    "name", ["ct-mixed", "ct-int4-group-zeros", "ct-mxfp4", "gptq-int4-act-order", "fp8-blocks", "awq"]
)
def test_a_format_in_halves_has_the_bits_of_the_whole(name, tmp_path):
    """The engine multiplies with packed weights, the halves with matrices."""
    packed, _ = write(tmp_path, CASES[name](), head_dim=64, hidden_size=256, intermediate_size=1088)
    check(packed, "bfloat16")
