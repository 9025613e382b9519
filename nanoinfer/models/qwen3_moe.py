"""Qwen3 with experts: every layer, or some, has a sparse MLP in place of the dense one."""

from transformers import PretrainedConfig

from nanoinfer.layers.experts import Sparse
from nanoinfer.models.layer import Traits
from nanoinfer.models.qwen3 import Qwen3
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(Qwen3):
    """https://arxiv.org/abs/2505.09388"""

    model_type = "qwen3_moe"
    has_layer_types = False
    has_one_window = True

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        is_normed = dict(reads=("norm_topk_prob",), is_normed=hf_config.norm_topk_prob)
        routing = routing_of(hf_config, "num_experts", is_rounded=True, **is_normed)
        sparse = Sparse(routing=routing, intermediate_size=hf_config.moe_intermediate_size)
        return super().traits(hf_config, sparse=sparse)

    @classmethod
    def is_sparse(cls, hf_config: PretrainedConfig, layer: int) -> bool:
        step = hf_config.decoder_sparse_step
        return layer not in (hf_config.mlp_only_layers or ()) and (layer + 1) % step == 0
