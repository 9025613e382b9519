"""Seed-OSS: Llama with biases of its own for queries, keys and values, and for the attention's output."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("SeedOssForCausalLM")
class SeedOss(Decoder):
    """https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct"""

    model_type = "seed_oss"
    config_traits = dict(qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias")
