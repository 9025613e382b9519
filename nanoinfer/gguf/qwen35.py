"""Qwen3.5, its sparse sibling and Qwen3-Next: gated attention in some layers, Gated DeltaNet in the others."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.gguf.keys import Keys

_INTERVAL = 4


def _qwen35(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    dense = dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text")
    size = keys.count("feed_forward_length")
    return _delta(keys, common, is_tiled=True) | dense | dict(intermediate_size=size)


def _qwen35moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    sparse = dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text")
    return _delta(keys, common, is_tiled=True) | sparse | _experts(keys)


def _qwen3next(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Its heads of values lie as in a checkpoint."""
    sparse = dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", norm_topk_prob=True)
    sparse |= dict(decoder_sparse_step=1, mlp_only_layers=[], intermediate_size=keys.count("feed_forward_length", 1))
    return _delta(keys, common, is_tiled=False) | sparse | _experts(keys)


def _delta(keys: Keys, common: dict[str, Any], *, is_tiled: bool) -> dict[str, Any]:
    """is_tiled: heads of values lie as llama.cpp's converter puts them: the first of all key heads, then the second."""
    num_layers = common["num_hidden_layers"]
    kv_heads = keys.counts("attention.head_count_kv", num_layers, common["num_attention_heads"])
    if len(found := set(kv_heads) - {0}) != 1:
        keys.refuse("attention.head_count_kv", f"is {shown(kv_heads)}: 0, or one number in all layers with attention")
    keys.take("rope.dimension_sections", None)  # of text all positions are the same
    for name in ("rope.mrope_interleaved", "ssm.v_head_reordered"):  # in files of Ollama
        keys.only(name, True)
    size, num_values, inner = (keys.count(f"ssm.{name}") for name in ("state_size", "time_step_rank", "inner_size"))
    if not num_values or inner % num_values:
        keys.refuse("ssm.inner_size", f"is {inner}, it must be a multiple of time_step_rank, {num_values}")
    return dict(
        num_key_value_heads=found.pop(),
        rope_parameters={"partial_rotary_factor": 1.0} | common["rope_parameters"],
        layer_types=_layer_types(keys, num_layers),
        linear_conv_kernel_dim=keys.count("ssm.conv_kernel"),
        linear_key_head_dim=size,
        linear_num_key_heads=keys.count("ssm.group_count"),
        linear_num_value_heads=num_values,
        linear_value_head_dim=inner // num_values,
        linear_heads_are_tiled=is_tiled,
    )


def _layer_types(keys: Keys, num_layers: int) -> list[str]:
    every = keys.count("full_attention_interval", _INTERVAL) or 1
    recurs = keys.take("attention.recurrent_layers", None)
    recurs = [(layer + 1) % every != 0 for layer in range(num_layers)] if recurs is None else list(recurs)
    if len(recurs) < num_layers:
        keys.refuse("attention.recurrent_layers", f"has {len(recurs):,} entries for {num_layers:,} layers")
    return ["linear_attention" if does else "full_attention" for does in recurs[:num_layers]]


def _experts(keys: Keys) -> dict[str, Any]:
    keys.take("feed_forward_length", None)
    keys.only("expert_gating_func", 0, 1)  # unsaid, or a softmax
    keys.only("expert_weights_norm", True)
    keys.only("expert_weights_scale", 1.0, 0.0)
    size = keys.count("expert_feed_forward_length")
    return dict(
        num_experts=keys.count("expert_count"),
        num_experts_per_tok=keys.count("expert_used_count"),
        moe_intermediate_size=size,
        shared_expert_intermediate_size=keys.count("expert_shared_feed_forward_length", size),
    )


QWEN35 = {"qwen35": _qwen35, "qwen35moe": _qwen35moe, "qwen3next": _qwen3next}
"""By the name of an architecture, as in `config.CONFIGS`."""
