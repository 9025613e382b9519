"""StarCoder 2: LayerNorm, an MLP without a gate, biases everywhere, and one sliding window for all layers."""

from nanoinfer.layers.mlp import MLP
from nanoinfer.layers.norm import LayerNorm
from nanoinfer.models.mistral import Mistral
from nanoinfer.models.registry import register


@register("Starcoder2ForCausalLM")
class Starcoder2(Mistral):
    """https://arxiv.org/abs/2402.19173"""

    model_type = "starcoder2"
    names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    own_traits = dict(norm=LayerNorm, mlp=MLP)
    config_traits = dict(norm_eps="norm_epsilon", qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias")
