"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in the upper layers where configured."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("Qwen2ForCausalLM")
class Qwen2(Decoder):
    """https://arxiv.org/abs/2407.10671"""

    model_type = "qwen2"
    has_layer_types = True  # transformers works them out from use_sliding_window and max_window_layers
    own_traits = dict(qkv_bias=True)
