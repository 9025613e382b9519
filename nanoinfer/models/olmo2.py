"""OLMo 2 and 3: norms behind attention and MLP alone, a norm over all heads, and a rotation in float32."""

from transformers import PretrainedConfig

from nanoinfer.layers.norm import WideRMSNorm
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Olmo2ForCausalLM")
class Olmo2(Decoder):
    """https://arxiv.org/abs/2501.00656"""

    model_type = "olmo2"
    names = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return super().traits(
            hf_config,
            norm=WideRMSNorm,
            norms_before=False,
            norms_after=True,
            qkv_bias=hf_config.attention_bias,
            output_bias=hf_config.attention_bias,
            qk_norm="all heads",
            float32_rope=True,
        )


@register("Olmo3ForCausalLM")
class Olmo3(Olmo2):
    """Three sliding layers, then a full one, with a rotation each."""

    model_type = "olmo3"
    has_layer_types = True
    rotates_by_layer_type = True
