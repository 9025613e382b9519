"""Granite 3 and the dense Granite 4: Llama with factors on embeddings, attention, residuals and logits."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register

_FACTORS = dict(
    attention_scale="attention_multiplier",
    embedding_scale="embedding_multiplier",
    residual_factor="residual_multiplier",
    logits_divisor="logits_scaling",
)


@register("GraniteForCausalLM")
class Granite(Decoder):
    """https://arxiv.org/abs/2408.13359 has the factors."""

    model_type = "granite"
    config_traits = _FACTORS | ATTENTION_BIAS | dict(mlp_bias="mlp_bias")


@register("GraniteMoeHybridForCausalLM")
class GraniteHybrid(Decoder):
    """The dense ones of Granite 4, whose layers are all attention and have no experts but the one that all share."""

    model_type = "granitemoehybrid"
    config_traits = _FACTORS | ATTENTION_BIAS
    layer_types = ("attention", "full_attention")
    intermediate_field = "shared_intermediate_size"
    names = {
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.gate_proj": "shared_mlp.gate_proj",
        "mlp.up_proj": "shared_mlp.up_proj",
        "mlp.down_proj": "shared_mlp.output_linear",
    }

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        if hf_config.num_local_experts:
            raise ValueError(f"num_local_experts={hf_config.num_local_experts} is not supported, only 0 is: no experts")
        return super().traits(hf_config)

    @classmethod
    def rope_parameters(cls, hf_config: PretrainedConfig) -> tuple[Mapping | None, ...]:
        rope = hf_config.rope_parameters if hf_config.position_embedding_type == "rope" else None
        return (rope,) * hf_config.num_hidden_layers
