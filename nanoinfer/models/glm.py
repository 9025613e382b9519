"""GLM-4: neighbours are rotated as pairs in a part of each head; from the models of 2025 on with four norms a layer."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("GlmForCausalLM")
class Glm(Decoder):
    """https://arxiv.org/abs/2406.12793"""

    model_type = "glm"
    rotates_in_part = True
    own_traits = dict(interleaved_rope=True)
    config_traits = dict(qkv_bias="attention_bias")


@register("Glm4ForCausalLM")
class Glm4(Glm):
    """Norms before and after attention and MLP."""

    model_type = "glm4"
    names = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
    own_traits = Glm.own_traits | dict(norms_after=True)
