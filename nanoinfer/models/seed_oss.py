"""Seed-OSS: Llama with biases of its own for queries, keys and values, and for the attention's output."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("SeedOssForCausalLM")
class SeedOss(Decoder):
    """https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct"""

    model_type = "seed_oss"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        biases = dict(qkv_bias=hf_config.attention_bias, output_bias=hf_config.attention_out_bias)
        return super().traits(hf_config, mlp_bias=hf_config.mlp_bias, **biases)
