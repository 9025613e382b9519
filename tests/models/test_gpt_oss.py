"""gpt-oss: what only its checkpoints have."""

import pytest
import torch
from dense_model import dense_logits
from engines import make_engine, random_prompts, run
from gpt_oss import LEFT_OUT, SIZES, mxfp4_checkpoint, rewrite
from online import load
from published_configs import write_published
from safetensors.torch import load_file
from tiny_models import make_checkpoint, random_tokens
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams
from nanoinfer.layers.formats.base import CheckpointTensors
from nanoinfer.layers.formats.registry import formats_of
from nanoinfer.layers.formats.scaled import PackedScaled
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.load import read_checkpoint, read_spec


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_has_the_bits_of_the_expanded_weights(dtype, tmp_path):
    packed, dense = mxfp4_checkpoint(tmp_path, dtype)
    tokens, models = random_tokens(40), [load(path) for path in (packed, dense)]
    ours, wanted = (dense_logits(model, tokens) for model in models)
    assert torch.equal(ours, wanted)
    bytes_of = [model.spec.sparse.expert_bytes for model in models]
    assert bytes_of[0] < (0.4 if dtype == "bfloat16" else 0.2) * bytes_of[1]
    prompts, params = random_prompts(2, 3, 40), [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 2
    found = run(make_engine(packed, dtype=dtype), prompts, params)
    assert found == run(make_engine(dense, dtype=dtype, enable_cpu_offload=True), prompts, params)
    if dtype == "float32":
        assert [one[0][0] for one in found] == reference_tokens(dense, prompts, 8)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantised_while_read(quantization, tmp_path):
    """In int4 attention's output has larger groups than the others, as in the published sizes: 4,096 and 2,880."""
    path = make_checkpoint("gpt_oss", tmp_path, dtype=torch.bfloat16, **SIZES | dict(head_dim=32))
    wide, ours = (load(path, name) for name in (None, quantization))
    assert ours.spec.sparse.expert_bytes < 0.8 * wide.spec.sparse.expert_bytes
    wanted, found = (dense_logits(model, random_tokens(40)) for model in (wide, ours))
    assert 0 < (found - wanted).norm() < (0.1 if quantization == "int8" else 1) * wanted.norm()


def test_a_tensor_of_all_experts_that_is_missing_or_corrupt_is_named(tmp_path):
    path = make_checkpoint("gpt_oss", tmp_path, **SIZES)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name][3, 1, 7] = torch.inf
    with pytest.raises(ValueError, match=f"{name} in .* holds weights that are NaN or infinite"):
        load(rewrite(path, tensors))
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ValueError, match=rf"{name} is \[5, 64, 192\], expected \[6, 64, 192\]"):
        load(rewrite(path, tensors))
    del tensors[name]
    with pytest.raises(ValueError, match=f"lacks tensors that GptOssForCausalLM needs: {name}"):
        load(rewrite(path, tensors))


def test_the_published_model_has_its_numbers(tmp_path):
    spec = read_spec(read_checkpoint(write_published("openai/gpt-oss-20b", tmp_path)), "auto")
    assert spec.dtype == torch.bfloat16, "which the config does not say"
    assert spec.windows == (128, None) * 12 and spec.attention.scale == 64**-0.5 and spec.attention.sinks
    assert (spec.max_position, spec.sparse.num_experts, spec.sparse.num_chosen) == (131_072, 32, 4)
    size = 2880 * (4 * 23 + 90 * 16)  # words of four exponents, and codes
    assert 0 <= spec.sparse.expert_bytes - 24 * 32 * (3 * size + 2 * 3 * 2880) < 24 * 32 * 6 * 128
    assert read_spec(read_checkpoint(write_shape("gpt-oss-20b", tmp_path)), "auto") == spec


def test_what_the_config_leaves_out_is_wide():
    settings = dict(quant_method="mxfp4", modules_to_not_convert=[*LEFT_OUT, "model.layers.2.mlp"])
    formats = formats_of(settings, CheckpointTensors(torch.bfloat16))
    packed, names = PackedScaled, ("1.mlp.experts.0.gate_proj", "2.mlp.experts.0.gate_proj", "1.self_attn.q_proj")
    assert [isinstance(formats.of(f"model.layers.{name}"), packed) for name in names] == [True, False, False]
