"""Gemma 4, text only: layers that slide have other heads than full ones, and values are normed, too."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from transformers import PretrainedConfig

from nanoinfer.kernels.attention.spec import HeadShape
from nanoinfer.layers.experts import Sparse
from nanoinfer.layers.norm import WideRMSNorm
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.gemma4_layer import Gemma4Layer
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of

_OF_KV = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..+")


@register("Gemma4UnifiedForCausalLM")
class Gemma4Unified(Decoder):
    """https://huggingface.co/google/gemma-4-12B-it"""

    model_type = "gemma4_unified_text"
    has_layer_types = True
    rotates_by_layer_type = True
    layer_fields = ("head_dim", "num_key_value_heads")
    optional_fields = ("num_experts", "moe_intermediate_size", "top_k_experts")
    layer_classes = {AttentionState: Gemma4Layer}
    own_traits = dict(
        norm=WideRMSNorm,
        norms_after=True,
        qk_norm="head",
        v_norm=True,
        attention_scale=1.0,
        rounds_embedding_scale=True,
    )
    config_traits = ATTENTION_BIAS | dict(activation="hidden_activation", logits_softcap="final_logit_softcapping")
    names = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "dense_output_norm": "post_feedforward_layernorm_1",
        "sparse_norm": "pre_feedforward_layernorm_2",
        "sparse_output_norm": "post_feedforward_layernorm_2",
        "router_norm.weight": "router.scale",
        "sparse.gate": "router.proj",
        "sparse.factors": "router.per_expert_scale",
        "sparse.experts": "experts",
        "input_gate": "per_layer_input_gate",
        "input_projection": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
        "layer_inputs.table": "embed_tokens_per_layer",
        "layer_inputs.projection": "per_layer_model_projection",
        "layer_inputs.norm": "per_layer_projection_norm",
    }

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        if hf_config.use_bidirectional_attention == "all":
            raise ValueError('use_bidirectional_attention="all" makes an encoder of the model; only decoders can run')
        for name in ("enable_moe_block", "hidden_size_per_layer_input"):
            if getattr(hf_config, name, None) and cls is Gemma4Unified:
                raise ValueError(f"{name}={getattr(hf_config, name)!r} is not supported in {cls.model_type}")
        return super().traits(hf_config, embedding_scale=hf_config.hidden_size**0.5)

    @classmethod
    def attention_shapes(cls, hf_config: PretrainedConfig) -> list[HeadShape]:
        return list(dict.fromkeys(cls._heads(hf_config)))

    @classmethod
    def _heads(cls, hf_config: PretrainedConfig) -> list[HeadShape]:
        """Return the heads of each layer."""
        pairs = zip(hf_config.per_layer_config, hf_config.layer_types, strict=True)
        return [
            HeadShape(
                hf_config.num_attention_heads,
                own.num_key_value_heads,
                own.head_dim,
                hf_config.attention_k_eq_v and layer_type == "full_attention",
            )
            for own, layer_type in pairs
        ]

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState, ...]:
        shapes, types, states = cls.attention_shapes(hf_config), hf_config.layer_types, super().layer_states(hf_config)
        num_own = cls._num_own(hf_config)
        last = {layer_type: layer for layer, layer_type in enumerate(types[:num_own])}
        found = []
        for layer, (state, heads) in enumerate(zip(states, cls._heads(hf_config), strict=True)):
            source = None if layer < num_own else last.get(types[layer])
            if layer >= num_own and (source is None or cls._heads(hf_config)[source] != heads):
                raise ValueError(
                    f"layer {layer} reads the keys and values of an earlier layer, num_kv_shared_layers="
                    f"{hf_config.num_kv_shared_layers}, but no layer of its own has {types[layer]} and its heads"
                )
            found.append(AttentionState(state.window, source, shapes.index(heads)))
        return tuple(found)

    @classmethod
    def _num_own(cls, hf_config: PretrainedConfig) -> int:
        """Return how many layers make keys and values: the first ones."""
        return hf_config.num_hidden_layers - hf_config.num_kv_shared_layers

    @classmethod
    def mlp_sizes(cls, hf_config: PretrainedConfig, traits: Traits) -> tuple[int, ...]:
        own, size = cls._num_own(hf_config), hf_config.intermediate_size
        wide = 2 * size if hf_config.use_double_wide_mlp else size
        return tuple(size if layer < own else wide for layer in range(hf_config.num_hidden_layers))

    def ignored(self, names: Collection[str]) -> set[str]:
        """Also what makes keys and values in layers that read another's."""
        reads = {str(layer) for layer in self.spec.attention_layers if self.spec.layers[layer].source is not None}
        unused = {name for name in names if (match := _OF_KV.fullmatch(name)) and match[1] in reads}
        return super().ignored(names) | unused


@register("Gemma4ForCausalLM")
class Gemma4(Gemma4Unified):
    """https://huggingface.co/google/gemma-4-31B-it"""

    model_type = "gemma4_text"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        size, words = hf_config.hidden_size_per_layer_input or 0, hf_config.vocab_size_per_layer_input
        if size and words != hf_config.vocab_size:
            raise ValueError(f"vocab_size_per_layer_input={words} must be vocab_size={hf_config.vocab_size}")
        traits = replace(super().traits(hf_config), layer_input_size=size)
        if not hf_config.enable_moe_block:
            return traits
        for name in cls.optional_fields:
            if getattr(hf_config, name) is None:
                raise ValueError(f"enable_moe_block=true needs {name}, which the config leaves out")
        routing = routing_of(hf_config, "num_experts", num_chosen="top_k_experts")
        sparse = Sparse(routing=routing, intermediate_size=hf_config.moe_intermediate_size, has_factors=True)
        return replace(traits, sparse=sparse)
