"""EXAONE 4: norms behind attention and MLP alone, a norm on each head, and full layers without positions."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("Exaone4ForCausalLM")
class Exaone4(Decoder):
    """https://arxiv.org/abs/2507.11407"""

    model_type = "exaone4"
    has_layer_types = True
    names = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
    own_traits = dict(norms_before=False, norms_after=True, qk_norm="head")

    @classmethod
    def rope_parameters(cls, hf_config: PretrainedConfig) -> tuple[Mapping | None, ...]:
        """Beside sliding layers, full ones are not rotated."""
        all_rotate = hf_config.sliding_window is None
        return tuple(
            hf_config.rope_parameters if all_rotate or layer_type == "sliding_attention" else None
            for layer_type in hf_config.layer_types
        )
