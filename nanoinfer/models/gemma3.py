"""Gemma 3, text only: sliding and full layers with a rotation each, and norms before and after attention and MLP."""

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanoinfer.layers.norm import OffsetRMSNorm, RMSNorm
from nanoinfer.models.base import AttentionState, ModelSpec
from nanoinfer.models.decoder import Decoder, DecoderLayer, Traits
from nanoinfer.models.registry import register


class Gemma3Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__(spec, traits, device=device)
        options = dict(dtype=spec.dtype, device=device)
        self.pre_feedforward_layernorm = traits.norm(spec.hidden_size, traits.norm_eps, **options)
        self.post_feedforward_layernorm = traits.norm(spec.hidden_size, traits.norm_eps, **options)

    def after_attention(self, x: Tensor, attn: Tensor, norm: RMSNorm) -> Tensor:
        # Attention's output has no name, so it is freed before the gated layer, the largest user of memory.
        normed = self.pre_feedforward_layernorm.after_sum(x, self.post_attention_layernorm(self.self_attn.o_proj(attn)))
        return norm.after_sum(x, self.post_feedforward_layernorm(self.mlp(normed)))


@register("Gemma3ForCausalLM")
class Gemma3(Decoder):
    """https://arxiv.org/abs/2503.19786"""

    model_type = "gemma3_text"
    has_layer_types = True
    # transformers keys the rotations by layer type, also those of older configs (rope_theta, rope_local_base_freq).
    rotates_by_layer_type = True
    layer_classes = {AttentionState: Gemma3Layer}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        if hf_config.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention=true makes an encoder of the model; only decoders can run")
        return Traits(
            norm_eps=hf_config.rms_norm_eps,
            activation=hf_config.hidden_activation,
            norm=OffsetRMSNorm,
            qkv_bias=hf_config.attention_bias,
            output_bias=hf_config.attention_bias,
            qk_norm="head",
            attention_scale=hf_config.query_pre_attn_scalar**-0.5,
            # The released checkpoints have none, and transformers reads the field but does not apply it.
            attention_softcap=hf_config.attn_logit_softcapping,
            embedding_scale=hf_config.hidden_size**0.5,
            logits_softcap=hf_config.final_logit_softcapping,
        )
