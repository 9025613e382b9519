"""Mistral: the plain decoder, with one sliding window for all layers where the config has one."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("MistralForCausalLM")
class Mistral(Decoder):
    """https://arxiv.org/abs/2310.06825"""

    model_type = "mistral"
    has_one_window = True
