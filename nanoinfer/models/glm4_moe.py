"""GLM-4.5 and later: the first layers are dense, experts are chosen in groups, and one is shared by all rows."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PretrainedConfig

from nanoinfer.kernels.experts.routing import SIGMOID
from nanoinfer.layers.experts import Sparse
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of

_DRAFTING = {"eh_proj", "enorm", "hnorm"}
"""What a layer has besides that guesses tokens ahead. Its head repeats the model's; a file may leave that out."""


@register("Glm4MoeForCausalLM")
class Glm4Moe(Decoder):
    """https://arxiv.org/abs/2508.06471"""

    model_type = "glm4_moe"
    rotates_in_part = True
    config_traits = dict(qkv_bias="attention_bias")
    names = {"mlp.choice_bias": "mlp.gate.e_score_correction_bias"}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        reads = "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"
        routing = routing_of(
            hf_config,
            "n_routed_experts",
            reads=(*reads, "n_shared_experts", "first_k_dense_replace"),
            scores=SIGMOID,
            is_normed=hf_config.norm_topk_prob,
            num_groups=hf_config.n_group or 1,
            num_chosen_groups=hf_config.topk_group or 1,
            factor=float(hf_config.routed_scaling_factor),
        )
        size = hf_config.moe_intermediate_size
        sparse = Sparse(
            routing=routing,
            intermediate_size=size,
            shared_size=size * (hf_config.n_shared_experts or 0),
            has_wide_logits=True,
            choice_bias=True,
        )
        return super().traits(hf_config, qk_norm="head" if hf_config.use_qk_norm else None, sparse=sparse)

    @classmethod
    def is_sparse(cls, hf_config: PretrainedConfig, layer: int) -> bool:
        return layer >= hf_config.first_k_dense_replace

    def drafts(self, names: Collection[str]) -> set[str]:
        prefix = f"model.layers.{len(self.spec.layers)}."
        own = {name for name in names if name.startswith(prefix)}
        # Without a drafting head's tensors it is an ordinary layer, which the config does not count: refused later.
        return own if _DRAFTING <= {name.removeprefix(prefix).partition(".")[0] for name in own} else set()
