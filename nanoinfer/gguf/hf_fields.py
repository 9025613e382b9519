"""What configs of all families say alike."""

from __future__ import annotations

from typing import Any


def named(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a family's config, with the two that name it."""
    return dict(architectures=[architecture], model_type=model_type, **fields)


def layer_types(slides: list[bool]) -> list[str]:
    """Return the types of layers, by whether each has a window."""
    return ["sliding_attention" if does else "full_attention" for does in slides]
