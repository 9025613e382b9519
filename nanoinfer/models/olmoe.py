"""OLMoE: experts in every layer, a norm over all heads, and queries, keys and values that may be clipped."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.layers.experts import Sparse
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of


@register("OlmoeForCausalLM")
class Olmoe(Decoder):
    """https://arxiv.org/abs/2409.02060"""

    model_type = "olmoe"
    own_traits = dict(qk_norm="all heads")
    config_traits = ATTENTION_BIAS | dict(clip_qkv="clip_qkv")

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        is_normed = dict(reads=("norm_topk_prob",), is_normed=hf_config.norm_topk_prob)
        routing = routing_of(hf_config, "num_experts", is_rounded=True, **is_normed)
        return super().traits(hf_config, sparse=Sparse(routing=routing, intermediate_size=hf_config.intermediate_size))
