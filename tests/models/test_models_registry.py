"""Which configs run, and what is said of those that do not."""

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, tiny_config

from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.registry import find_class, register, supported_architectures
from nanoinfer.weights.load import read_spec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_inputs": "Gemma4ForCausalLM",
    "gemma4_moe": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4": "GraniteMoeHybridForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan": "HunYuanDenseV1ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def spec_of(family: str, **fields) -> ModelSpec:
    config = tiny_config(family, architectures=[ARCHITECTURES[family]], **fields)
    return read_spec(CheckpointInfo(directory=Path(), hf_config=config), torch.bfloat16)


def test_every_family_is_registered():
    assert set(supported_architectures()) == {*ARCHITECTURES.values(), "Ernie4_5_ForCausalLM"}


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_comes_from_the_config_alone(family):
    spec = spec_of(family, head_dim=48, num_heads=6, num_kv_heads=2, tied=True, num_layers=5)
    heads = spec.attention
    assert spec.architecture == ARCHITECTURES[family]
    assert (len(spec.layers), spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (5, 72, 56, 160)
    assert (heads.num_q_heads, heads.num_kv_heads, heads.head_dim, spec.max_position) == (6, 2, 48, 4096)
    assert spec.tied_embeddings and spec.dtype == torch.bfloat16 and heads.softcap is None
    assert heads.scale == (20 if family == "gemma3" else 48) ** -0.5
    assert spec.weight_bytes > 2 * 160 * 72


@pytest.mark.parametrize(
    "family, fields, windows",
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {}, (None, None, None)),
        ("mistral", dict(sliding_window=9), (9, 9, 9)),
        ("qwen2", dict(sliding_window=9), (None, 9, 9)),
        ("qwen2", dict(sliding_window=9, use_sliding_window=False), (None, None, None)),
        ("qwen3", dict(sliding_window=9, max_window_layers=2), (None, None, 9)),
        ("gemma3", dict(sliding_window=9), (9, 9, None)),
        ("phi3", dict(sliding_window=9), (9, 9, 9)),
        (
            "ministral",
            dict(sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2, num_layers=4),
            (9, None, 9, None),
        ),
        ("smollm3", dict(sliding_window=9, num_layers=4), (None, None, None, 9)),
        ("gemma4", dict(sliding_window=9), (9, 9, None)),
        ("gemma4_unified", dict(layer_types=None, sliding_window=9, num_layers=7), (9, 9, 9, 9, 9, None, None)),
        ("gemma3", dict(layer_types=None, sliding_window=9, num_layers=7), (9, 9, 9, 9, 9, None, 9)),
        ("gpt_oss", dict(sliding_window=9, num_layers=5), (9, None, 9, None, 9)),
        ("qwen3_moe", dict(sliding_window=9), (9, 9, 9)),
        ("qwen3_moe", dict(sliding_window=9, use_sliding_window=False), (None, None, None)),
        ("mixtral", dict(sliding_window=9), (9, 9, 9)),
    ],
    ids=str,
)
def test_windows_of_the_layers(family, fields, windows):
    assert spec_of(family, **fields).windows == windows


def test_one_rotation_table_serves_layers_that_rotate_alike():
    assert spec_of("llama").rope_bytes(10) == 10 * 16 * 2
    assert spec_of("gemma3").rope_bytes(10) == 2 * 10 * 16 * 2


def test_unsupported_architecture_is_refused_with_checkpoints_that_run():
    with pytest.raises(
        ValueError, match="nobody has written this family yet; give one that runs here, such as Qwen/Qwen3-"
    ):
        find_class(tiny_config("qwen3", architectures=["Qwen9MoeForCausalLM"]).architectures)


def test_config_without_architecture_is_refused():
    with pytest.raises(ValueError, match="names no architecture: download it again"):
        find_class(tiny_config("llama").architectures)


def test_an_architecture_registers_once():
    llama = find_class(tiny_config("llama", architectures=["LlamaForCausalLM"]).architectures)
    with pytest.raises(ValueError, match="LlamaForCausalLM is already registered, by Llama"):
        register("LlamaForCausalLM")(llama)


@pytest.mark.parametrize(
    "family, fields, message",
    [
        ("llama", dict(head_dim=24), "head_dim=24: supported are multiples of 16 from 16 to 512"),
        ("llama", dict(head_dim=528), "head_dim=528"),
        ("llama", dict(num_heads=4, num_kv_heads=3), "4 query heads and 3 KV heads"),
        ("llama", dict(hidden_act="gelu_tanh"), "'gelu_tanh' is not supported.*silu, gelu, gelu_pytorch_tanh"),
        ("llama", dict(rope_parameters=dict(rope_type="axial", rope_theta=1e4)), "'axial' is not supported"),
        (
            "llama",
            dict(quantization_config=dict(quant_method="quanto")),
            "quant_method='quanto', which is not supported: give the checkpoint in 16 bits, with quantization=.int4., "
            "or one of compressed-tensors, gptq, auto-round, awq, fp8",
        ),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma4", dict(use_bidirectional_attention="all"), 'use_bidirectional_attention="all" makes an encoder'),
        (
            "gemma4_unified",
            dict(enable_moe_block=True),
            "enable_moe_block=True is not supported in gemma4_unified_text",
        ),
        ("gemma4_moe", dict(top_k_experts=9), "top_k_experts=9 is more than num_experts=8"),
        ("gemma4_moe", dict(num_experts=None), "enable_moe_block=true needs num_experts"),
        (
            "gemma4_inputs",
            dict(vocab_size_per_layer_input=100),
            "vocab_size_per_layer_input=100 must be vocab_size=160",
        ),
        ("gemma4", dict(num_kv_shared_layers=2), "layer 2 reads .* but no layer of its own has full_attention"),
        ("granite4", dict(num_local_experts=4), "num_local_experts=4 is not supported, only 0"),
        ("qwen3", dict(layer_types=["sliding_attention"] * 3), "sliding_attention layers, but sliding_window=None"),
    ],
    ids=str,
)
def test_configs_that_cannot_run_are_refused(family, fields, message):
    with pytest.raises(ValueError, match=message):
        spec_of(family, **fields)
