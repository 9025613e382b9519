"""Configs: for each architecture, what its metadata would be in the config.json of the same model.

What llama.cpp takes where a key is absent (`src/models/` there) is taken here. Where it differs from transformers, the
model is as transformers has it: that is what it was trained as, and what answers are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.common.missing import UnsupportedArchitectureError, why_not
from nanoinfer.gguf.hf_fields import layer_types, named
from nanoinfer.gguf.keys import Keys
from nanoinfer.gguf.ollama import REFUSED, as_of_llama_cpp
from nanoinfer.gguf.qwen35 import QWEN35
from nanoinfer.gguf.reader import GGUFFile
from nanoinfer.gguf.rotation import rotation
from nanoinfer.gguf.unlike_layers import gemma4, lfm2, lfm2moe

_EMBEDDINGS = "token_embd.weight"
_GEMMA_27B_LAYERS = 62
# Whose norms subtract the mean, and have another key.
_OTHER_NORMS = ("nemotron", "starcoder2")
# Whose layers have unlike heads and MLPs.
_LAYERS_DIFFER = ("gemma4", "lfm2", "lfm2moe", *QWEN35)


def raw_config(file: GGUFFile) -> dict[str, Any]:
    """Return what config.json would hold; ValueError if the architecture, or something of it, is not supported."""
    name = architecture_of(file)
    keys = Keys(as_of_llama_cpp(file))
    common = _common(keys)
    config = common | CONFIGS[name](keys, common)
    keys.check_all_asked()
    return config


def architecture_of(file: GGUFFile) -> str:
    """Return what the file calls its architecture; ValueError if it is not supported, or missing."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ValueError(f"{file.path} says no general.architecture: the file is not whole, or holds no model")
    if name not in CONFIGS:
        what = f"{file.path} has architecture {shown(name)}, which is not supported"
        raise UnsupportedArchitectureError(f"{what}: {REFUSED.get(name) or why_not(name)}", name)
    return name


def _common(keys: Keys) -> dict[str, Any]:
    tensors, metadata = keys.file.tensors, keys.file.metadata
    if _EMBEDDINGS not in tensors or len(tensors[_EMBEDDINGS].shape) != 2:
        raise ValueError(f"{keys.file.path} holds no {_EMBEDDINGS}: it is a vocabulary, or a part of a model")
    vocab_size = tensors[_EMBEDDINGS].shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise ValueError(f"{keys.file.path}: tokenizer.ggml.tokens is {shown(tokens)}: a list of texts is needed")
    if len(tokens) > vocab_size:
        raise ValueError(f"{keys.file.path} has {len(tokens):,} tokens and embeddings of {vocab_size:,}")
    keys.take("vocab_size", None)  # the embeddings say it
    keys.only("attention.causal", True)
    keys.only("pooling_type", 0)
    differ = keys.architecture in _LAYERS_DIFFER
    hidden_size, num_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if not num_heads or not hidden_size:
        keys.refuse("attention.head_count", f"is {num_heads} for embedding_length {hidden_size}")
    usual = hidden_size // num_heads
    head_dim, context = keys.count("attention.key_length", usual), keys.count("context_length")
    if keys.count("attention.value_length", usual) != head_dim:
        keys.refuse("attention.value_length", f"is {keys.count('attention.value_length', usual)}, of keys {head_dim}")
    num_layers = keys.count("block_count") - keys.count("nextn_predict_layers", 0)
    config = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=None if differ else keys.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=rotation(keys, head_dim, context),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=_has(keys, "attn_q.bias", "attn_qkv.bias"),
        hidden_act="silu",
        dtype="bfloat16",
        # transformers has ids of its own for some families, which lie beyond small vocabularies.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    if keys.has("feed_forward_length") and not differ:
        config["intermediate_size"] = keys.count("feed_forward_length")
    if keys.architecture in _OTHER_NORMS:
        keys.take("attention.layer_norm_rms_epsilon", None)  # files of nemotron have both
    else:
        config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    if any(not tensor.type.is_wide for tensor in tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def _has(keys: Keys, *endings: str) -> bool:
    """Whether the first layer has one of these tensors."""
    return any(f"blk.0.{ending}" in keys.file.tensors for ending in endings)


def _llama(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Also Mistral, whose files say no window."""
    num_experts, num_chosen = keys.count("expert_count", 0), keys.count("expert_used_count", 0)
    if num_experts:
        experts = dict(num_local_experts=num_experts, num_experts_per_tok=num_chosen, sliding_window=None)
        return named("MixtralForCausalLM", "mixtral", **experts)
    return named("LlamaForCausalLM", "llama", mlp_bias=_has(keys, "ffn_up.bias"))


def _mistral3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    beta = keys.number("attention.temperature_scale", 0)
    if not beta:
        return named("MistralForCausalLM", "mistral") | {"sliding_window": None}
    rope = common["rope_parameters"]
    if rope["rope_type"] != "yarn":
        keys.refuse("attention.temperature_scale", "needs a rotation of type yarn")
    rope = rope | {"llama_4_scaling_beta": beta}
    return named("Ministral3ForCausalLM", "ministral3", rope_parameters=rope)


def _qwen2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return named("Qwen2ForCausalLM", "qwen2", use_sliding_window=False)


def _qwen3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return named("Qwen3ForCausalLM", "qwen3", use_sliding_window=False)


def _qwen3moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    num_chosen = keys.count("expert_used_count")
    if not num_chosen:
        keys.refuse("expert_used_count", "is 0: a token needs an expert")
    if keys.has("expert_feed_forward_length"):
        size = keys.count("expert_feed_forward_length")
    else:
        size = keys.count("feed_forward_length") // num_chosen
    return named(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=keys.count("expert_count"),
        num_experts_per_tok=num_chosen,
        moe_intermediate_size=size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _gemma3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    num_layers, rope = common["num_hidden_layers"], common["rope_parameters"]
    window = keys.count("attention.sliding_window", 0)
    slides = [False] * num_layers
    local = dict(rope_type="default", rope_theta=10000.0)
    if window:
        slides = keys.flags("attention.sliding_window_pattern", num_layers, 6)
        local["rope_theta"] = keys.number("rope.freq_base_swa", 10000.0)
    is_27b = num_layers == _GEMMA_27B_LAYERS
    softcap = keys.number("final_logit_softcapping", 0)
    return named(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=common["hidden_size"] // common["num_attention_heads"] if is_27b else common["head_dim"],
        sliding_window=window or None,
        layer_types=layer_types(slides),
        rope_parameters={"full_attention": rope, "sliding_attention": local},
        final_logit_softcapping=softcap or None,
    )


def _gpt_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    num_layers, rope = common["num_hidden_layers"], common["rope_parameters"]
    keys.only("rope.freq_base_swa", rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        rope = rope | {"truncate": False}  # as it was trained; no file says so
    return named(
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=keys.count("expert_feed_forward_length"),
        num_local_experts=keys.count("expert_count"),
        num_experts_per_tok=keys.count("expert_used_count"),
        sliding_window=keys.count("attention.sliding_window"),
        layer_types=layer_types(keys.flags("attention.sliding_window_pattern", num_layers, 2)),
        rope_parameters=rope,
    )


def _phi3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    length = common["rope_parameters"].get("original_max_position_embeddings")
    return named(
        "Phi3ForCausalLM",
        "phi3",
        sliding_window=keys.count("attention.sliding_window", 0) or None,
        original_max_position_embeddings=length or common["max_position_embeddings"],
    )


def _granite(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.only("expert_count", 0)
    keys.only("expert_used_count", 0)
    keys.only("rope.scaling.finetuned", True)
    return named(
        "GraniteForCausalLM",
        "granite",
        logits_scaling=keys.number("logit_scale"),
        residual_multiplier=keys.number("residual_scale", 0) or 1.0,
        embedding_multiplier=keys.number("embedding_scale", 0) or 1.0,
        attention_multiplier=keys.number("attention.scale", 0) or common["head_dim"] ** -0.5,
        mlp_bias=_has(keys, "ffn_up.bias"),
    )


def _smollm3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    rotates = [int((layer + 1) % 4 != 0) for layer in range(common["num_hidden_layers"])]
    return named("SmolLM3ForCausalLM", "smollm3", no_rope_layers=rotates, use_sliding_window=False)


def _ernie(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return named("Ernie4_5ForCausalLM", "ernie4_5", use_bias=common["attention_bias"])


def _glm4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 1.0} | common["rope_parameters"]
    return named("Glm4ForCausalLM", "glm4", rope_parameters=rope)


def _glm4moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 1.0} | common["rope_parameters"]
    keys.only("expert_gating_func", 0, 2)  # unsaid, or a sigmoid
    return named(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        rope_parameters=rope,
        n_routed_experts=keys.count("expert_count"),
        num_experts_per_tok=keys.count("expert_used_count"),
        moe_intermediate_size=keys.count("expert_feed_forward_length"),
        n_shared_experts=keys.count("expert_shared_count"),
        first_k_dense_replace=keys.count("leading_dense_block_count", 0),
        routed_scaling_factor=keys.number("expert_weights_scale", 0) or 1.0,
        norm_topk_prob=bool(keys.take("expert_weights_norm", False)),
        n_group=keys.count("expert_group_count", 0) or 1,
        topk_group=keys.count("expert_group_used_count", 0) or 1,
        use_qk_norm=_has(keys, "attn_q_norm.weight"),
    )


def _exaone4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    num_layers, pattern = common["num_hidden_layers"], "attention.sliding_window_pattern"
    is_32b = num_layers == 64
    window = keys.count("attention.sliding_window", 4096 if is_32b else 0)
    keys.only("rope.freq_base_swa", common["rope_parameters"]["rope_theta"])
    slides = [False] * num_layers
    if window and (is_32b or keys.has(pattern)):
        slides = keys.flags(pattern, num_layers, 4)
    else:
        window = None
    return named("Exaone4ForCausalLM", "exaone4", sliding_window=window, layer_types=layer_types(slides))


def _hunyuan(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.only("expert_count", 0, 1)
    keys.only("expert_used_count", 0, 1)
    return named("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")


def _nemotron(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 1.0} | common["rope_parameters"]
    return named(
        "NemotronForCausalLM",
        "nemotron",
        norm_eps=keys.number("attention.layer_norm_epsilon"),
        hidden_act="relu2",
        mlp_bias=_has(keys, "ffn_up.bias"),
        rope_parameters=rope,
    )


def _olmo2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.count("attention.sliding_window", 0)
    if not window:
        return named("Olmo2ForCausalLM", "olmo2")
    num_layers, rope = common["num_hidden_layers"], common["rope_parameters"]
    local = dict(rope_type="default", rope_theta=keys.number("rope.freq_base_swa", rope["rope_theta"]))
    return named(
        "Olmo3ForCausalLM",
        "olmo3",
        sliding_window=window,
        layer_types=layer_types(keys.flags("attention.sliding_window_pattern", num_layers, 4)),
        rope_parameters={"full_attention": rope, "sliding_attention": local},
    )


def _olmoe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    experts = dict(num_experts=keys.count("expert_count"), num_experts_per_tok=keys.count("expert_used_count"))
    return named("OlmoeForCausalLM", "olmoe", norm_topk_prob=False, **experts)


def _seed_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return named("SeedOssForCausalLM", "seed_oss", attention_out_bias=_has(keys, "attn_output.bias"), mlp_bias=False)


def _starcoder2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return named(
        "Starcoder2ForCausalLM",
        "starcoder2",
        norm_epsilon=keys.number("attention.layer_norm_epsilon"),
        hidden_act="gelu_pytorch_tanh",
        use_bias=common["attention_bias"],
        sliding_window=None,
    )


CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "gpt-oss": _gpt_oss,
    "phi3": _phi3,
    "granite": _granite,
    "smollm3": _smollm3,
    "ernie4_5": _ernie,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "seed_oss": _seed_oss,
    "starcoder2": _starcoder2,
} | QWEN35
"""By the name of an architecture: its own fields, beside those that all have, or in their place."""
