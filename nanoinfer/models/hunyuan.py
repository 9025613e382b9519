"""Hunyuan, dense: a norm on each query and key head behind the rotation."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from nanoinfer.models.decoder import ATTENTION_BIAS, Decoder
from nanoinfer.models.registry import register


@register("HunYuanDenseV1ForCausalLM")
class HunYuanDense(Decoder):
    """https://huggingface.co/tencent/Hunyuan-7B-Instruct"""

    model_type = "hunyuan_v1_dense"
    names = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
    can_stretch = False  # the checkpoints' rotation is stretched already, by alpha
    own_traits = dict(qk_norm="rotated head")
    config_traits = ATTENTION_BIAS

    @classmethod
    def rope_parameters(cls, hf_config: PretrainedConfig) -> tuple[Mapping | None, ...]:
        """A "dynamic" rotation with alpha is a plain one of a larger base, whatever the length."""
        rope = hf_config.rope_parameters
        if rope["rope_type"] == "dynamic" and rope.get("alpha"):
            dim = hf_config.head_dim or hf_config.hidden_size // hf_config.num_attention_heads
            rope = dict(rope_type="default", rope_theta=rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
        return (rope,) * hf_config.num_hidden_layers
