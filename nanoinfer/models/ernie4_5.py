"""Ernie 4.5, dense: neighbouring elements of a head are rotated together, in float32."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("Ernie4_5_ForCausalLM")  # as the first checkpoints say
@register("Ernie4_5ForCausalLM")
class Ernie45(Decoder):
    """https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT"""

    model_type = "ernie4_5"
    own_traits = dict(interleaved_rope=True, float32_rope=True)
    config_traits = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), "use_bias")
