"""Qwen3 (dense): a norm on each query and key head, in place of the biases of Qwen2."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder, Traits
from nanoinfer.models.registry import register


@register("Qwen3ForCausalLM")
class Qwen3(Decoder):
    """https://arxiv.org/abs/2505.09388"""

    model_type = "qwen3"
    has_layer_types = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return Traits(
            norm_eps=hf_config.rms_norm_eps,
            activation=hf_config.hidden_act,
            qkv_bias=hf_config.attention_bias,
            output_bias=hf_config.attention_bias,
            qk_norm=True,
        )
