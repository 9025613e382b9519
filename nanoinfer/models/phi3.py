"""Phi-3 and Phi-4: merged projections, a part of each head rotated in the small Phi-4, longrope, a sliding window."""

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import register


@register("Phi3ForCausalLM")
class Phi3(Decoder):
    """https://arxiv.org/abs/2404.14219"""

    model_type = "phi3"
    has_one_window = True
    rotates_in_part = True
    can_stretch = False  # transformers takes "yarn" for longrope here
