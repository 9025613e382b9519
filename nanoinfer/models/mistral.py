"""Mistral: the plain decoder, with one sliding window for all layers where the config has one."""

from transformers import PretrainedConfig

from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("MistralForCausalLM")
class Mistral(Decoder):
    """https://arxiv.org/abs/2310.06825"""

    model_type = "mistral"

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState, ...]:
        return (AttentionState(hf_config.sliding_window or None),) * hf_config.num_hidden_layers
