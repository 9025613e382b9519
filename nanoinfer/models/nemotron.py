"""Nemotron 3 and 4, and Minitron: LayerNorm that counts from 1, squared ReLU without a gate, heads rotated in part."""

from nanoinfer.layers.mlp import MLP
from nanoinfer.layers.norm import OffsetLayerNorm
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.registry import register


@register("NemotronForCausalLM")
class Nemotron(Decoder):
    """https://arxiv.org/abs/2402.16819"""

    model_type = "nemotron"
    rotates_in_part = True
    own_traits = dict(norm=OffsetLayerNorm, mlp=MLP)
    config_traits = ATTENTION_BIAS | dict(norm_eps="norm_eps", mlp_bias="mlp_bias")
