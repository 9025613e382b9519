"""Qwen3 (dense): a norm on each query and key head, in place of the biases of Qwen2."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.registry import register


@register("Qwen3ForCausalLM")
class Qwen3(Decoder):
    """https://arxiv.org/abs/2505.09388"""

    model_type = "qwen3"
    has_layer_types = True
    own_traits = dict(qk_norm="head")
    config_traits = ATTENTION_BIAS

    @classmethod
    def trained_length(cls, hf_config: PretrainedConfig) -> int:
        # 40,960 positions are those of the training and room for an answer behind them, says the model card.
        limit = super().trained_length(hf_config)
        return 32_768 if limit == 40_960 else limit
