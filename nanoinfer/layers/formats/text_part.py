"""Names of a text model's modules in a multimodal checkpoint, and the formats of one that is quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoinfer.layers.formats.base import DENSE, Formats, WeightFormat

# Beginnings of names, each with the one that the text model alone would have: as transformers has them since 4.52 in
# memory, and in files.
_BEGINNINGS = (
    (("model.language_model.", "model."), ("lm_head.", "lm_head.")),
    (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
)
_PARTS = (
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "vision_embedder",
    "visual",
)
_OTHERS = tuple(f"{beginning}{part}." for beginning in ("", "model.") for part in _PARTS)


def is_of_other_part(name: str) -> bool:
    """Whether a tensor belongs to the model of images or sound, or to what joins it to the text model."""
    return name.startswith(_OTHERS)


def text_name(name: str) -> str:
    """Return the name that a tensor of the checkpoint has in the text model."""
    for long, short in (pair for way in _BEGINNINGS for pair in way):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def long_names(name: str) -> list[str]:
    """Return the names that a tensor of the text model may have in the checkpoint, the newer way first."""
    names = [long + name.removeprefix(short) for way in _BEGINNINGS for long, short in way if name.startswith(short)]
    return names or [name]


class TextPart(Formats):
    """The formats of the text model, from those of the whole checkpoint. settings: its quantization_config."""

    def __init__(self, base: Formats, settings: dict[str, Any]) -> None:
        self._base, self.notice, self.has_kv_scheme = base, base.notice, base.has_kv_scheme
        self._is_newer = any("model.language_model" in text for text in _texts(settings))

    def of(self, name: str) -> WeightFormat:
        newer, older = (long.removesuffix(".") for long in long_names(f"{name}."))
        if name == "lm_head" and self._base.of(newer) is DENSE:  # both spellings leave the head out
            return DENSE
        return self._base.of(newer if self._is_newer else older)

    def of_embeddings(self, name: str) -> WeightFormat:
        return self._base.of_embeddings(long_names(name)[not self._is_newer])

    def check_quantization(self, quantization: str | None) -> None:
        self._base.check_quantization(quantization)


def _texts(content: Any) -> Iterator[str]:
    """All texts in an object, without the backslashes of regular expressions."""
    if isinstance(content, str):
        yield content.replace("\\", "")
    elif isinstance(content, dict | list):
        for one in [*content, *content.values()] if isinstance(content, dict) else content:
            yield from _texts(one)
