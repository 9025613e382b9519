"""OLMo 2 and 3: norms behind attention and MLP alone, a norm over all heads, and a rotation in float32."""

from nanoinfer.layers.norm import WideRMSNorm
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.registry import register


@register("Olmo2ForCausalLM")
class Olmo2(Decoder):
    """https://arxiv.org/abs/2501.00656"""

    model_type = "olmo2"
    names = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
    own_traits = dict(norm=WideRMSNorm, norms_before=False, norms_after=True, qk_norm="all heads", float32_rope=True)
    config_traits = ATTENTION_BIAS


@register("Olmo3ForCausalLM")
class Olmo3(Olmo2):
    """Three sliding layers, then a full one, with a rotation each."""

    model_type = "olmo3"
    has_layer_types = True
    rotates_by_layer_type = True
