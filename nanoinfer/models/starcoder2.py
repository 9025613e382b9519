"""StarCoder 2: LayerNorm, an MLP without a gate, biases everywhere, and one sliding window for all layers."""

from transformers import PretrainedConfig

from nanoinfer.layers.mlp import MLP
from nanoinfer.layers.norm import LayerNorm
from nanoinfer.models.layer import Traits
from nanoinfer.models.mistral import Mistral
from nanoinfer.models.registry import register


@register("Starcoder2ForCausalLM")
class Starcoder2(Mistral):
    """https://arxiv.org/abs/2402.19173"""

    model_type = "starcoder2"
    names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return Traits(
            norm_eps=hf_config.norm_epsilon,
            activation=hf_config.hidden_act,
            norm=LayerNorm,
            mlp=MLP,
            qkv_bias=hf_config.use_bias,
            output_bias=hf_config.use_bias,
            mlp_bias=hf_config.use_bias,
        )
