"""Qwen3-Next: as Qwen3.5 with experts, but for how a checkpoint holds the projections of Gated DeltaNet."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.delta_layer import DeltaDecoder, sparse_of
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Qwen3NextForCausalLM")
class Qwen3Next(DeltaDecoder):
    """https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct"""

    model_type = "qwen3_next"
    delta_may_be_in_groups = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        return super().traits(hf_config, sparse=sparse_of(hf_config, is_normed=hf_config.norm_topk_prob))

    @classmethod
    def is_sparse(cls, hf_config: PretrainedConfig, layer: int) -> bool:
        step = hf_config.decoder_sparse_step
        return layer not in (hf_config.mlp_only_layers or ()) and (layer + 1) % step == 0
