"""Llama 2, 3 and derivatives: the plain decoder, with biases where the config asks for them."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder, Traits
from nanoinfer.models.registry import register


@register("LlamaForCausalLM")
class Llama(Decoder):
    """https://arxiv.org/abs/2407.21783"""

    model_type = "llama"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return Traits(
            norm_eps=hf_config.rms_norm_eps,
            activation=hf_config.hidden_act,
            qkv_bias=hf_config.attention_bias,
            output_bias=hf_config.attention_bias,
            mlp_bias=hf_config.mlp_bias,
        )
