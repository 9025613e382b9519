"""Nemotron 3 and 4, and Minitron: LayerNorm that counts from 1, squared ReLU without a gate, heads rotated in part."""

from transformers import PretrainedConfig

from nanoinfer.layers.mlp import MLP
from nanoinfer.layers.norm import OffsetLayerNorm
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("NemotronForCausalLM")
class Nemotron(Decoder):
    """https://arxiv.org/abs/2402.16819"""

    model_type = "nemotron"
    rotates_in_part = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return Traits(
            norm_eps=hf_config.norm_eps,
            activation=hf_config.hidden_act,
            norm=OffsetLayerNorm,
            mlp=MLP,
            qkv_bias=hf_config.attention_bias,
            output_bias=hf_config.attention_bias,
            mlp_bias=hf_config.mlp_bias,
        )
