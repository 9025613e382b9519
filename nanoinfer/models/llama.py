"""Llama 2, 3 and derivatives: the plain decoder, with biases where the config asks for them."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("LlamaForCausalLM")
class Llama(Decoder):
    """https://arxiv.org/abs/2407.21783"""

    model_type = "llama"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        bias = hf_config.attention_bias
        return super().traits(hf_config, qkv_bias=bias, output_bias=bias, mlp_bias=hf_config.mlp_bias)
