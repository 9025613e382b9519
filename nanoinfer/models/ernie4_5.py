"""Ernie 4.5, dense: neighbouring elements of a head are rotated together, in float32."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.registry import register


@register("Ernie4_5_ForCausalLM")  # as the first checkpoints say
@register("Ernie4_5ForCausalLM")
class Ernie45(Decoder):
    """https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT"""

    model_type = "ernie4_5"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        bias = bool(hf_config.use_bias)
        biases = dict(qkv_bias=bias, output_bias=bias, mlp_bias=bias)
        return super().traits(hf_config, interleaved_rope=True, float32_rope=True, **biases)
