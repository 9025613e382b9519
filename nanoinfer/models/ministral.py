"""Ministral: Mistral with a kind of attention for each layer; Ministral 3: with queries that grow with the position."""

from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.mistral import Mistral
from nanoinfer.models.registry import register


@register("MinistralForCausalLM")
class Ministral(Decoder):
    """https://huggingface.co/mistralai/Ministral-8B-Instruct-2410"""

    model_type = "ministral"
    has_layer_types = True


@register("Ministral3ForCausalLM")
class Ministral3(Mistral):
    """https://huggingface.co/mistralai/Ministral-3-8B-Base-2512"""

    model_type = "ministral3"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        rope = hf_config.rope_parameters
        scaling = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        if None in scaling:
            raise ValueError("rope_parameters lack llama_4_scaling_beta or original_max_position_embeddings")
        return super().traits(hf_config, query_scaling=scaling)
