"""Llama 2, 3 and derivatives: the plain decoder, with biases where the config asks for them."""

from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.registry import register


@register("LlamaForCausalLM")
class Llama(Decoder):
    """https://arxiv.org/abs/2407.21783"""

    model_type = "llama"
    config_traits = ATTENTION_BIAS | dict(mlp_bias="mlp_bias")
