"""Images and other parts of a conversation that are no text: refused, or a text stands in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What parts are called in the three APIs, by the word that stands in their place.
_KINDS = {
    "image": ("image", "image_url", "input_image", "image_file"),
    "document": ("document", "file", "input_file"),
    "sound": ("audio", "input_audio", "audio_url"),
    "video": ("video", "video_url"),
}
WORDS = {kind: word for word, kinds in _KINDS.items() for kind in kinds}
_LISTS = ("messages", "input", "system")  # of a request
_INNER = ("content", "output")  # of what stands in these lists, and of a tool's result


def replace_images(request: dict[str, Any], found: Callable[[str, str, str], None]) -> None:
    """Put a text in the place of each part that is no text.

    Args:
        request: the body of a request, which is changed.
        found: told where a part is, its type, and the field of the request; may raise.
    """
    for field in _LISTS:
        if isinstance(request.get(field), list):
            _go_through(request[field], field, lambda where, kind, field=field: found(where, kind, field))


def _go_through(parts: list[Any], where: str, found: Callable[[str, str], None]) -> None:
    for place, part in enumerate(parts):
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if isinstance(kind, str) and kind in WORDS:
            found(f"{where}[{place}]", kind)
            parts[place] = {"type": "text", "text": f"[{WORDS[kind]}: left out, as this model reads text only]"}
            continue
        for name in _INNER:
            if isinstance(part.get(name), list):
                _go_through(part[name], f"{where}[{place}].{name}", found)
