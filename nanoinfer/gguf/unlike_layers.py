"""Architectures whose layers differ in heads, in the size of their MLP, or in what they keep; see `config.py`."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.gguf.hf_fields import layer_types, named
from nanoinfer.gguf.keys import Keys


def gemma4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """What full layers have otherwise than windowed ones is written as newer configs have it, layer by layer."""
    num_layers, rope, tensors = common["num_hidden_layers"], common["rope_parameters"], keys.file.tensors
    slides = keys.flags("attention.sliding_window_pattern", num_layers, 6)
    num_shared, sizes = keys.count("attention.shared_kv_layers", 0), keys.counts("feed_forward_length", num_layers)
    full, local = common["head_dim"], keys.count("attention.key_length_swa", common["head_dim"])
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        keys.only(name, local)
    keys.only("attention.scale", 1.0)
    kv_heads = keys.counts("attention.head_count_kv", num_layers, common["num_attention_heads"])
    own = [
        dict(head_dim=local if does else full, num_key_value_heads=heads)
        for does, heads in zip(slides, kv_heads, strict=True)
    ]
    num_own = max(0, num_layers - num_shared)
    is_wide = sizes[num_own:] == [2 * sizes[0]] * num_shared and num_shared > 0
    if set(sizes[:num_own] if is_wide else sizes) != {sizes[0]}:
        keys.refuse("feed_forward_length", f"is {shown(sizes)}: layers that read others' keys may have twice as much")
    makes = {
        any(f"blk.{at}.attn_{name}.weight" in tensors for name in ("v", "qkv"))
        for at in range(num_own)
        if not slides[at]
    }
    if len(makes) > 1:
        keys.refuse("block_count", "layers without a window have attn_v, or none has it")
    experts, num_chosen = keys.count("expert_count", 0), keys.count("expert_used_count", 0)
    size = keys.count("expert_feed_forward_length", 0)
    return named(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **own[0],
        intermediate_size=sizes[0],
        use_double_wide_mlp=is_wide,
        per_layer_config={str(at): one for at, one in enumerate(own) if one != own[0]},
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=keys.count("attention.sliding_window"),
        layer_types=layer_types(slides),
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": dict(rope_type="default", rope_theta=keys.number("rope.freq_base_swa", 10000.0)),
        },
        attention_k_eq_v=makes == {False},
        num_kv_shared_layers=num_shared,
        hidden_size_per_layer_input=keys.count("embedding_length_per_layer_input", 0),
        vocab_size_per_layer_input=common["vocab_size"],
        final_logit_softcapping=keys.number("final_logit_softcapping", 0) or None,
        enable_moe_block=experts > 0,
        num_experts=experts or None,
        top_k_experts=num_chosen or None,
        moe_intermediate_size=size or None,
    )


def lfm2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys have a convolution. The size of an MLP is the one that it has."""
    num_layers = common["num_hidden_layers"]
    kv_heads = keys.counts("attention.head_count_kv", num_layers)
    if len(found := set(kv_heads) - {0}) != 1:
        keys.refuse("attention.head_count_kv", f"is {shown(kv_heads)}: 0, or one number in all layers with attention")
    return named(
        "Lfm2ForCausalLM",
        "lfm2",
        num_key_value_heads=found.pop(),
        layer_types=["full_attention" if heads else "conv" for heads in kv_heads],
        intermediate_size=keys.count("feed_forward_length"),
        block_auto_adjust_ff_dim=False,
        conv_L_cache=keys.count("shortconv.l_cache"),
        conv_bias=False,
        norm_eps=common["rms_norm_eps"],
    )


def lfm2moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.only("expert_gating_func", 2)  # a sigmoid
    keys.only("expert_weights_norm", True)
    return lfm2(keys, common) | named(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        num_experts=keys.count("expert_count"),
        num_experts_per_tok=keys.count("expert_used_count"),
        moe_intermediate_size=keys.count("expert_feed_forward_length"),
        num_dense_layers=keys.count("leading_dense_block_count", 0),
        routed_scaling_factor=keys.number("expert_weights_scale", 0) or 1.0,
        norm_topk_prob=True,
        use_expert_bias=True,
    )
