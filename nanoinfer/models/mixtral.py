"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.layers.experts import Sparse
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.layer import Traits
from nanoinfer.models.mistral import Mistral
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of


@register("MixtralForCausalLM")
class Mixtral(Mistral):
    """https://arxiv.org/abs/2401.04088"""

    model_type = "mixtral"
    names = {"mlp": "block_sparse_moe"}

    def __init__(self, checkpoint: CheckpointInfo, spec: ModelSpec, **options) -> None:
        if "model.layers.0.mlp.gate" in checkpoint.modules:  # written with the names that modules have here
            self.names = {}
        super().__init__(checkpoint, spec, **options)

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        routing = routing_of(hf_config, "num_local_experts")
        sparse = Sparse(routing=routing, intermediate_size=hf_config.intermediate_size, names=("w1", "w3", "w2"))
        return super().traits(hf_config, sparse=sparse)
