"""Well-known checkpoints that run here: what messages point to where something else does not."""

from __future__ import annotations

from collections.abc import Collection

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
    "microsoft/Phi-4-mini-instruct microsoft/phi-4": "Phi3ForCausalLM",
    "ibm-granite/granite-3.3-8b-instruct": "GraniteForCausalLM",
    "allenai/OLMo-2-1124-7B-Instruct": "Olmo2ForCausalLM",
    "zai-org/GLM-4-9B-0414": "Glm4ForCausalLM",
    "bigcode/starcoder2-7b": "Starcoder2ForCausalLM",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "SeedOssForCausalLM",
    "Qwen/Qwen3-30B-A3B Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3MoeForCausalLM",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "MixtralForCausalLM",
    "allenai/OLMoE-1B-7B-0924-Instruct": "OlmoeForCausalLM",
    "zai-org/GLM-4.5-Air": "Glm4MoeForCausalLM",
    "openai/gpt-oss-20b openai/gpt-oss-120b": "GptOssForCausalLM",
})  # fmt: skip
# What an architecture is that does not run, by a part of its name; the first that is found counts.
_KINDS = by_name({
    "ForSequenceClassification ForTokenClassification ForMaskedLM": "does not generate text",
    "Moe Llama4 Deepseek Dbrx": "is a sparse model",
    "Qwen3Next": "is a sparse model with recurrent layers",
    "Mamba Jamba Rwkv FalconH1 NemotronH": "has recurrent layers",
    "Lfm2": "has convolutions",
    "T5 Bart": "is an encoder with a decoder",
    "VL Llava": "takes images",
    "ForConditionalGeneration": "takes more than text",
})  # fmt: skip
# By the beginning of an unsupported architecture's name, what people can run in its place.
_CLOSEST = by_name({
    "Qwen2": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct"),
    "Llama": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
    "Llava Mllama": ("google/gemma-3-12b-it", "meta-llama/Llama-3.1-8B-Instruct"),
    "Mistral": ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Small-24B-Instruct-2501"),
    "Gemma": ("google/gemma-3-12b-it", "google/gemma-3-1b-it"),
    "Deepseek": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Qwen/Qwen3-14B"),
    "Phi": ("microsoft/phi-4", "microsoft/Phi-4-mini-instruct", "Qwen/Qwen3-4B"),
    "Granite": ("ibm-granite/granite-3.3-8b-instruct", "Qwen/Qwen3-8B"),
    "Olmo": ("allenai/OLMo-2-1124-7B-Instruct", "Qwen/Qwen3-8B"),
    "Glm ChatGLM": ("zai-org/GLM-4-9B-0414", "Qwen/Qwen3-8B"),
    "GPT": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "Qwen/Qwen3-0.6B"),
})  # fmt: skip
_COMMON = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "meta-llama/Llama-3.1-8B-Instruct")


def checkpoint_named(name: str) -> str | None:
    """Return the hub id of a model that was given by its bare name, such as "qwen3-14b", or None."""
    return next((one for one in CHECKPOINTS if _plain(name) in _bare_names(one)), None)


def instead_of(architecture: str, supported: Collection[str]) -> str:
    """Return what an unsupported architecture is, where its name tells, and which checkpoints run in its place.

    It names no architecture: with another one in its config.json a checkpoint would be read as what it is not.
    """
    kind = next((what for part, what in _KINDS.items() if part in architecture), None)
    wanted = next((ids for begin, ids in _CLOSEST.items() if architecture.startswith(begin)), ())
    running = [one for one in (*wanted, *_COMMON) if CHECKPOINTS[one] in supported][:2]
    said = f"it {kind}, which cannot be run yet" if kind else "it cannot be run yet"
    return f"{said}; {' or '.join(running)} can" if running else said


def _bare_names(checkpoint: str) -> tuple[str, ...]:
    plain = _plain(checkpoint.partition("/")[2])
    return plain, plain.removesuffix("it"), plain.removesuffix("instruct"), _plain(checkpoint)


def _plain(name: str) -> str:
    """Letters and digits alone: "llama3.1-8b", "Llama-3.1-8B" and "llama3.1:8b" are one name."""
    return "".join(filter(str.isalnum, name.lower()))
