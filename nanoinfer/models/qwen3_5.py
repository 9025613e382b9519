"""Qwen3.5 and later: gated attention in every fourth layer, Gated DeltaNet in the others; and its sparse sibling."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.delta_layer import DeltaDecoder, sparse_of
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Qwen3_5ForCausalLM")
class Qwen3_5(DeltaDecoder):
    """https://huggingface.co/Qwen/Qwen3.5-9B"""

    model_type = "qwen3_5_text"


@register("Qwen3_5MoeForCausalLM")
class Qwen3_5Moe(DeltaDecoder):
    """https://huggingface.co/Qwen/Qwen3.5-35B-A3B"""

    model_type = "qwen3_5_moe_text"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return super().traits(hf_config, sparse=sparse_of(hf_config))

    @classmethod
    def mlp_sizes(cls, hf_config: PretrainedConfig, traits: Traits) -> tuple[int, ...]:
        return (0,) * hf_config.num_hidden_layers
