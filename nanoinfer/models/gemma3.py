"""Gemma 3, text only: sliding and full layers with a rotation each, and norms before and after attention and MLP."""

from transformers import PretrainedConfig

from nanoinfer.layers.norm import OffsetRMSNorm
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Gemma3ForCausalLM")
class Gemma3(Decoder):
    """https://arxiv.org/abs/2503.19786"""

    model_type = "gemma3_text"
    has_layer_types = True
    # transformers keys the rotations by layer type, also those of older configs (rope_theta, rope_local_base_freq).
    rotates_by_layer_type = True
    own_traits = dict(norm=OffsetRMSNorm, norms_after=True, qk_norm="head", rounds_embedding_scale=True)
    config_traits = ATTENTION_BIAS | dict(
        activation="hidden_activation",
        # The released checkpoints have none, and transformers reads the field but does not apply it.
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
    )
    names = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        if hf_config.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention=true makes an encoder of the model; only decoders can run")
        scales = dict(attention_scale=hf_config.query_pre_attn_scalar**-0.5, embedding_scale=hf_config.hidden_size**0.5)
        return super().traits(hf_config, **scales)
