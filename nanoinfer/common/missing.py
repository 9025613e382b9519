"""What models need that is not here, by their configs and by what checkpoints and GGUF files call them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanoinfer.common.tables import by_name

_MLA = "multi-head latent attention (MLA)"
_SELECTED = "attention to selected keys (DSA)"
_LINEAR = "linear attention"
_MAMBA = "Mamba layers"
_CHUNKS = "attention in chunks"
_ENCODER = "an encoder"
# By what a layer is called in `layer_types` and `layers_block_type`.
_LAYERS = by_name({
    "linear_attention gated_deltanet kda": _LINEAR,
    "mamba mamba2 hybrid": _MAMBA,
    "recurrent": "recurrent layers",
    "chunked_attention": _CHUNKS,
})  # fmt: skip
_OF_MAMBA = "mamba_d_state", "ssm_state_size", "mamba_d_conv", "ssm_cfg"
# By a field of the config that says something.
_FIELDS = by_name({
    "kv_lora_rank": _MLA,
    "index_topk": _SELECTED,
    "linear_conv_kernel_dim linear_attn_config": _LINEAR,
    " ".join(_OF_MAMBA): _MAMBA,
    "attention_chunk_size": _CHUNKS,
    "is_encoder_decoder": _ENCODER,
    "alibi": "positions by ALiBi",
})  # fmt: skip
# By the beginning of the name, of an architecture or in a GGUF file; the longest that fits counts.
_NAMES = by_name({
    "DeepseekV2 DeepseekV3 Glm4MoeLite MiniCPM3 KimiK2 KimiK25 LongcatFlash Mistral4 Youtu": _MLA,
    "DeepseekV32 GlmMoeDsa glm-dsa": f"{_MLA} and {_SELECTED}",
    "DeepseekV4": _SELECTED,
    "KimiLinear": f"{_LINEAR} and {_MLA}",
    "OlmoHybrid MiniMaxText01 MiniMaxM1 MiniMaxForCausalLM": _LINEAR,
    "Mamba FalconMamba Jamba Bamba Zamba FalconH1 NemotronH GraniteHybrid Plamo2": _MAMBA,
    "Rwkv xLSTM RecurrentGemma": "recurrent layers",
    "Llama4": _CHUNKS,
    "Qwen2Moe": "a shared expert behind a gate",
    "Phimoe": "its routing (SparseMixer)",
    "Gemma3n": "embeddings of each layer",
    "Gemma4Assistant Gemma4UnifiedAssistant gemma4-assistant": "the model that it guesses tokens for",
    "GPTNeoX GPTJ CodeGen Cohere command-r Falcon PhiForCausalLM phi2": "attention and MLP side by side",
    "GPT2 GPTBigCode OPTForCausalLM opt": "learned positions",
    "Bloom MPT": "positions by ALiBi",
    "T5 MT5 UMT5 Bart MBart Pegasus Whisper": _ENCODER,
})  # fmt: skip
# By a part of the name. deepseek2 is what GGUF files call all with MLA.
_NO_TEXT = "SequenceClassification", "TokenClassification", "MaskedLM", "QuestionAnswering"
_NAMES |= {"deepseek2": _MLA}
_OTHER_PARTS = "vision_config", "audio_config", "vision_start_token_id"


class UnsupportedArchitectureError(ValueError):
    """A checkpoint's architecture does not run here; `name`: what the checkpoint calls it."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def plain(name: str) -> str:
    """Letters and digits alone, as names are compared."""
    return "".join(filter(str.isalnum, name.lower()))


def longest_beginning(name: str, names: Mapping[str, Any]) -> str | None:
    """Return the longest of these names with which another one begins, whatever its case and dashes; None: none."""
    fitting = [one for one in names if plain(name).startswith(plain(one))]
    return max(fitting, key=len, default=None)


def why_not(name: str, config: Mapping[str, Any] | None = None) -> str:
    """Return why an architecture does not run, as a sentence that begins with "it", as far as it is known.

    name: of the architecture, or what a GGUF file says. config: its config.json; None: there is none.
    """
    if any(part in name for part in _NO_TEXT) or plain(name).startswith("bert"):
        return "it does not generate text"
    needs = list(dict.fromkeys(_needs(config or {})))
    if not needs and (beginning := longest_beginning(name, _NAMES)) is not None:
        needs = [_NAMES[beginning]]
    if needs:
        return f"it needs {' and '.join(needs)}, which is not here yet"
    if any(part in (config or {}) for part in _OTHER_PARTS) or name.endswith("ForConditionalGeneration"):
        return (
            "it takes more than text, and only of Gemma 3 and 4, Qwen3.5, Mistral 3 and Llava the text part runs alone"
        )
    return "nobody has written this family yet"


def missing_layers(config: Mapping[str, Any], known: Collection[str] = ()) -> str | None:
    """Return what layers of a supported architecture need that is not here, or None: not all of a family may run.

    known: the types of layers that the family has here.
    """
    return " and ".join(dict.fromkeys(_of_layers(config, known))) or None


def _needs(config: Mapping[str, Any]) -> Iterator[str]:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    for part in parts:
        yield from _of_layers(part)
        yield from (need for field, need in _FIELDS.items() if part.get(field))


def _of_layers(config: Mapping[str, Any], known: Collection[str] = ()) -> Iterator[str]:
    for field in ("layer_types", "layers_block_type"):
        types = config.get(field)
        for one in types if isinstance(types, list) else ():
            if isinstance(one, str) and one in _LAYERS:
                # Newer versions of transformers call other recurrent layers so, too.
                is_other = one == "linear_attention" and any(config.get(field) for field in _OF_MAMBA)
                if is_other or one not in known:
                    yield _MAMBA if is_other else _LAYERS[one]
