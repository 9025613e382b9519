"""The text part of multimodal checkpoints, which runs alone: its config and its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.common.missing import why_not
from nanoinfer.layers.formats.text_part import is_of_other_part, text_name
from nanoinfer.models.checkpoint_info import TensorEntry
from nanoinfer.models.checkpoints import instead_of
from nanoinfer.models.registry import architecture_of, room_here
from nanoinfer.weights.checkpoint import OBJECT

# By architecture: the model_type of a text_config that names none.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "LlavaForConditionalGeneration": "llama",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}


def text_config(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that the text part of a checkpoint would have alone.

    path, raw: the config.json of one of the architectures of `WRAPPERS`.

    Raises:
        ValueError: it has no text part, or one that is not supported.
    """
    wrapper = raw["architectures"][0]
    OBJECT.check(f"{path} is no valid config", "text_config", raw.get("text_config"))
    outer = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    config = {name: raw[name] for name in outer if raw.get(name) is not None}
    config = {"model_type": WRAPPERS[wrapper]} | raw["text_config"] | config
    architecture = architecture_of(config["model_type"])
    if architecture is None:
        name = config["model_type"]
        why = f"{why_not(str(name), config)}; {instead_of(wrapper, room_here())}"
        raise ValueError(f"{path}: the text part of this {wrapper}, {shown(name)}, is not supported: {why}")
    return config | {"architectures": [architecture]}


def text_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of the text part, by the names that they would have alone."""
    return {text_name(name): entry for name, entry in entries.items() if not is_of_other_part(name)}


def say_what_is_skipped(model_dir: str | Path, entries: Mapping[str, TensorEntry]) -> None:
    """Warn of weights that do not run. entries: of the whole checkpoint."""
    skipped = {name: entry.num_bytes for name, entry in entries.items() if is_of_other_part(name)}
    if skipped:
        has_sound = any("audio" in name for name in skipped)
        whose, what = ("vision and audio", "images and sound") if has_sound else ("vision", "images")
        warnings.warn(
            f"the text part of {model_dir} runs alone: its {whose} weights ({len(skipped):,} tensors, "
            f"{sum(skipped.values()) / 2**20:,.0f} MiB) are skipped, and {what} are refused",
            stacklevel=2,
        )
