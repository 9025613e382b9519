"""Phi-3 and Phi-4: merged projections, a part of each head rotated in the small Phi-4, longrope, a sliding window."""

from transformers import PretrainedConfig

from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("Phi3ForCausalLM")
class Phi3(Decoder):
    """https://arxiv.org/abs/2404.14219"""

    model_type = "phi3"
    rotates_in_part = True
    can_stretch = False  # transformers takes "yarn" for longrope here

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState, ...]:
        return (AttentionState(hf_config.sliding_window or None),) * hf_config.num_hidden_layers
