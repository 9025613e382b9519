"""GLM-4: neighbours are rotated as pairs in a part of each head; from the models of 2025 on with four norms a layer."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("GlmForCausalLM")
class Glm(Decoder):
    """https://arxiv.org/abs/2406.12793"""

    model_type = "glm"
    rotates_in_part = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig, **own) -> Traits:
        return super().traits(hf_config, qkv_bias=hf_config.attention_bias, interleaved_rope=True, **own)


@register("Glm4ForCausalLM")
class Glm4(Glm):
    """Norms before and after attention and MLP."""

    model_type = "glm4"
    names = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return super().traits(hf_config, norms_after=True)
