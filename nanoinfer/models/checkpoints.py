"""Well-known checkpoints that run here: what messages point to where another one does not."""

from __future__ import annotations

from nanoinfer.models.registry import supported_architectures

CHECKPOINTS: dict[str, str] = {
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen2.5-14B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen2.5-32B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen3-0.6B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-1.7B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-4B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-14B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-32B": "Qwen3ForCausalLM",
    "meta-llama/Llama-3.1-8B-Instruct": "LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B-Instruct": "LlamaForCausalLM",
    "meta-llama/Llama-3.2-3B-Instruct": "LlamaForCausalLM",
    "meta-llama/Llama-3.3-70B-Instruct": "LlamaForCausalLM",
    "mistralai/Mistral-7B-Instruct-v0.3": "MistralForCausalLM",
    "mistralai/Mistral-Nemo-Instruct-2407": "MistralForCausalLM",
    "mistralai/Mistral-Small-24B-Instruct-2501": "MistralForCausalLM",
    "google/gemma-3-270m-it": "Gemma3ForCausalLM",
    "google/gemma-3-1b-it": "Gemma3ForCausalLM",
}
"""By hub id, the architecture that the checkpoint's config names."""


def checkpoint_named(name: str) -> str | None:
    """Return the hub id of a model that was given by its bare name, such as "qwen3-14b", or None."""
    found = [checkpoint for checkpoint in _running() if _plain(name) in _names(checkpoint)]
    return found[0] if found else None


def _running() -> list[str]:
    return [checkpoint for checkpoint, architecture in CHECKPOINTS.items() if architecture in supported_architectures()]


def _names(checkpoint: str) -> tuple[str, ...]:
    plain = _plain(checkpoint.partition("/")[2])
    return plain, plain.removesuffix("it"), plain.removesuffix("instruct")


def _plain(name: str) -> str:
    """Letters and digits alone: "llama3.1-8b", "Llama-3.1-8B" and "llama3.1:8b" are one name."""
    return "".join(filter(str.isalnum, name.lower()))
