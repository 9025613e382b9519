"""SmolLM3: Llama with layers whose heads are not rotated, every fourth one."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import register


@register("SmolLM3ForCausalLM")
class SmolLM3(Llama):
    """https://huggingface.co/blog/smollm3"""

    model_type = "smollm3"
    has_layer_types = True

    @classmethod
    def rope_parameters(cls, hf_config: PretrainedConfig) -> tuple[Mapping | None, ...]:
        rotations = super().rope_parameters(hf_config)
        rotates = hf_config.no_rope_layers  # 1 where a layer rotates, against the name
        if len(rotates) < len(rotations):
            raise ValueError(f"no_rope_layers has {len(rotates)} entries for {len(rotations)} layers")
        return tuple(rope if does else None for rope, does in zip(rotations, rotates, strict=False))
