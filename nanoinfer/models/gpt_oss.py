"""gpt-oss: sliding and full layers in turn, heads with sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.kernels.experts.routing import SOFTMAX_OF_CHOSEN, GatedActivation
from nanoinfer.layers.experts import Sparse
from nanoinfer.layers.norm import WideRMSNorm
from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of


@register("GptOssForCausalLM")
class GptOss(Decoder):
    """https://arxiv.org/abs/2508.10925"""

    model_type = "gpt_oss"
    has_layer_types = True
    own_traits = dict(norm=WideRMSNorm, attention_sinks=True)
    config_traits = ATTENTION_BIAS
    names = {"mlp.gate": "mlp.router"}

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        routing = routing_of(hf_config, "num_local_experts", scores=SOFTMAX_OF_CHOSEN, is_rounded=True)
        limit, alpha = (
            getattr(hf_config, f"swiglu_{name}", None) or usual for name, usual in (("limit", 7.0), ("alpha", 1.702))
        )
        sparse = Sparse(
            routing=routing,
            intermediate_size=hf_config.intermediate_size,
            router_bias=True,
            expert_bias=True,
            in_turn=True,
            activation=GatedActivation(name=hf_config.hidden_act, limit=limit, alpha=alpha),
        )
        return super().traits(hf_config, sparse=sparse)
