"""Well-known checkpoints that run here: what messages point to where something else does not."""

from __future__ import annotations

import re
from typing import NamedTuple

from nanoinfer.common.missing import longest_beginning, plain
from nanoinfer.common.tables import by_name

# By hub id, the architecture that runs the checkpoint, or its text part.
CHECKPOINTS: dict[str, str] = by_name({
    "Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-14B-Instruct "
    "Qwen/Qwen2.5-32B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B": "Qwen3ForCausalLM",
    "meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.2-3B-Instruct "
    "meta-llama/Llama-3.3-70B-Instruct deepseek-ai/DeepSeek-R1-Distill-Llama-8B "
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "LlamaForCausalLM",
    "HuggingFaceTB/SmolLM3-3B": "SmolLM3ForCausalLM",
    "mistralai/Mistral-7B-Instruct-v0.3 mistralai/Mistral-Nemo-Instruct-2407 "
    "mistralai/Mistral-Small-24B-Instruct-2501": "MistralForCausalLM",
    "google/gemma-3-1b-it google/gemma-3-4b-it google/gemma-3-12b-it google/gemma-3-27b-it": "Gemma3ForCausalLM",
    "google/gemma-4-E2B-it google/gemma-4-E4B-it google/gemma-4-26B-A4B-it google/gemma-4-31B-it": "Gemma4ForCausalLM",
    "google/gemma-4-12B-it": "Gemma4UnifiedForCausalLM",
    "microsoft/Phi-4-mini-instruct microsoft/phi-4": "Phi3ForCausalLM",
    "ibm-granite/granite-3.3-8b-instruct": "GraniteForCausalLM",
    "ibm-granite/granite-4.0-micro": "GraniteMoeHybridForCausalLM",
    "allenai/OLMo-2-1124-7B-Instruct": "Olmo2ForCausalLM",
    "zai-org/GLM-4-9B-0414": "Glm4ForCausalLM",
    "bigcode/starcoder2-7b": "Starcoder2ForCausalLM",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "SeedOssForCausalLM",
    "Qwen/Qwen3-30B-A3B Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3MoeForCausalLM",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "MixtralForCausalLM",
    "allenai/OLMoE-1B-7B-0924-Instruct": "OlmoeForCausalLM",
    "zai-org/GLM-4.5-Air": "Glm4MoeForCausalLM",
    "LiquidAI/LFM2-350M LiquidAI/LFM2-700M LiquidAI/LFM2-1.2B LiquidAI/LFM2-2.6B LiquidAI/LFM2.5-350M "
    "LiquidAI/LFM2.5-1.2B-Instruct LiquidAI/LFM2.5-1.2B-Thinking LiquidAI/LFM2.5-2.6B": "Lfm2ForCausalLM",
    "LiquidAI/LFM2-8B-A1B LiquidAI/LFM2-24B-A2B LiquidAI/LFM2.5-8B-A1B "
    "LiquidAI/LFM2.5-24B-A2B": "Lfm2MoeForCausalLM",
    "openai/gpt-oss-20b openai/gpt-oss-120b": "GptOssForCausalLM",
    "Qwen/Qwen3.5-0.8B Qwen/Qwen3.5-2B Qwen/Qwen3.5-4B Qwen/Qwen3.5-9B Qwen/Qwen3.6-27B": "Qwen3_5ForCausalLM",
    "Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.6-35B-A3B": "Qwen3_5MoeForCausalLM",
    "Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3-Coder-Next": "Qwen3NextForCausalLM",
})  # fmt: skip
# By the beginning of the name of a model that does not run: what people can run instead, the nearest first.
_CLOSEST = by_name({
    "Qwen2": (
        "Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ),
    "Qwen3VLMoe Qwen3OmniMoe Qwen4": (
        "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B",
    ),
    "Llama": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    "Llama4": ("openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B-Instruct"),
    "Llava Mllama": (
        "google/gemma-3-12b-it", "google/gemma-3-4b-it", "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-1b-it",
    ),
    "Mistral Pixtral": (
        "mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Nemo-Instruct-2407",
        "mistralai/Mistral-7B-Instruct-v0.3",
    ),
    "Gemma": ("google/gemma-3-27b-it", "google/gemma-3-12b-it", "google/gemma-3-4b-it", "google/gemma-3-1b-it"),
    "Deepseek KimiK2 KimiK25 LongcatFlash MiniMax": (
        "openai/gpt-oss-120b", "zai-org/GLM-4.5-Air", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Qwen/Qwen3-4B",
    ),
    "Phi": ("microsoft/phi-4", "microsoft/Phi-4-mini-instruct"),
    "Granite": ("ibm-granite/granite-3.3-8b-instruct", "ibm-granite/granite-4.0-micro"),
    "Olmo": ("allenai/OLMo-2-1124-7B-Instruct",),
    "OlmoHybrid FlexOlmo": ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMoE-1B-7B-0924-Instruct"),
    "GlmMoe Glm4Moe Glm5 glm-dsa": ("zai-org/GLM-4.5-Air", "zai-org/GLM-4-9B-0414", "Qwen/Qwen3-4B"),
    "Glm ChatGLM": ("zai-org/GLM-4-9B-0414", "Qwen/Qwen3-4B"),
    "GPT": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "Qwen/Qwen3-0.6B"),
})  # fmt: skip
# Other names than the end of a hub id: those of `nanoinfer plan`, and those that people use.
_CALLED = {
    "granite-4-micro": "ibm-granite/granite-4.0-micro", "olmo2-7b": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo2-13b": "allenai/OLMo-2-1124-13B-Instruct", "olmoe-7b": "allenai/OLMoE-1B-7B-0924-Instruct",
    "glm-4-9b": "zai-org/GLM-4-9B-0414", "glm-4-32b": "zai-org/GLM-4-32B-0414",
    "exaone-4-32b": "LGAI-EXAONE/EXAONE-4.0-32B", "ernie-4.5-0.3b": "baidu/ERNIE-4.5-0.3B-PT",
    "nemotron-mini-4b": "nvidia/Nemotron-Mini-4B-Instruct", "starcoder2-15b": "bigcode/starcoder2-15b",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
}  # fmt: skip
_COMMON = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B")
# Billions of parameters, where the name does not say them.
_PARAMETERS = {
    "microsoft/phi-4": 14.7, "microsoft/Phi-4-mini-instruct": 3.8, "mistralai/Mistral-Nemo-Instruct-2407": 12.2,
    "zai-org/GLM-4.5-Air": 107.0, "ibm-granite/granite-4.0-micro": 3.4, "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "LiquidAI/LFM2-350M": 0.35, "LiquidAI/LFM2-700M": 0.74, "LiquidAI/LFM2.5-350M": 0.35,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6.9, "Qwen/Qwen3-Coder-Next": 79.7,
}  # fmt: skip
_SPARSE = {"Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM"}
_SPARSE |= {"Lfm2MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"}
# Bytes that a parameter in 4 bits comes to, with its share of scales, wider weights, context and working memory.
_BYTES_IN_4_BITS = 0.65


class Room(NamedTuple):
    """Bytes of a machine's memory. gpu: None: there is no GPU, and models run on the host."""

    gpu: int | None
    host: int


def checkpoint_named(name: str) -> str | None:
    """Return the hub id of a model that was given by its bare name, such as "qwen3-14b", or None."""
    wanted = plain(name)
    called = (checkpoint for short, checkpoint in _CALLED.items() if plain(short) == wanted)
    return next(called, None) or next((one for one in CHECKPOINTS if wanted in _bare_names(one)), None)


def bare_names() -> list[str]:
    """Return names that `checkpoint_named` knows, one for each checkpoint or more."""
    ends = (one.partition("/")[2].lower() for one in CHECKPOINTS)
    return [*_CALLED, *(end.removesuffix("-it").removesuffix("-instruct") for end in ends)]


def instead_of(name: str, room: Room | None = None) -> str:
    """Return which checkpoints run in the place of one that does not, the nearest that fit into this memory.

    It names no architecture: with another one in its config.json a checkpoint would be read as what it is not.

    name: of the architecture, or what a GGUF file says. room: None: as large as need be.
    """
    begin = longest_beginning(name, _CLOSEST)
    near = dict.fromkeys((*(() if begin is None else _CLOSEST[begin]), *_COMMON))
    running = [one for one in near if room is None or _fits(one, room)][:2]
    return f"give one that runs here, such as {' or '.join(running)}" if running else "nothing that is known here fits"


def _fits(checkpoint: str, room: Room) -> bool:
    """Whether it runs in 4 bits without weights that stream in every step: experts may lie in host memory."""
    needed = 1e9 * parameters_of(checkpoint) * _BYTES_IN_4_BITS
    if room.gpu is None:
        return needed <= room.host
    return needed <= room.gpu or CHECKPOINTS[checkpoint] in _SPARSE and needed <= room.gpu + room.host


def parameters_of(checkpoint: str) -> float:
    """Return how many billions of parameters one of `CHECKPOINTS` has."""
    size = re.search(r"(\d+(?:\.\d+)?)b\b", checkpoint.lower())
    return _PARAMETERS.get(checkpoint) or float(size[1])


def _bare_names(checkpoint: str) -> tuple[str, ...]:
    end = plain(checkpoint.partition("/")[2])
    return end, end.removesuffix("it"), end.removesuffix("instruct"), plain(checkpoint)
