"""Qwen3 (dense): a norm on each query and key head, in place of the biases of Qwen2."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Qwen3ForCausalLM")
class Qwen3(Decoder):
    """https://arxiv.org/abs/2505.09388"""

    model_type = "qwen3"
    has_layer_types = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig, **own) -> Traits:
        bias = hf_config.attention_bias
        return super().traits(hf_config, qkv_bias=bias, output_bias=bias, qk_norm="head", **own)

    @classmethod
    def trained_length(cls, hf_config: PretrainedConfig) -> int:
        # 40,960 positions are those of the training and room for an answer behind them, says the model card.
        limit = super().trained_length(hf_config)
        return 32_768 if limit == 40_960 else limit
