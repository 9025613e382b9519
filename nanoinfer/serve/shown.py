"""How error messages show a value that a client sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHOWN_CHARS = 80


def shown(value: Any) -> str:
    """Return the beginning of a long text, or of the value's `repr`; all of a large value's would take seconds."""
    text = ""
    for part in [value] if isinstance(value, str) and len(value) > SHOWN_CHARS else _repr_parts(value):
        text += part
        if len(text) > SHOWN_CHARS:
            return text[:SHOWN_CHARS] + "..."
    return text


def _repr_parts(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        yield "["
        for place, one in enumerate(value):
            yield ", " if place else ""
            yield from _repr_parts(one)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for place, (name, one) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _repr_parts(name)
            yield ": "
            yield from _repr_parts(one)
        yield "}"
    else:
        yield repr(value[: SHOWN_CHARS + 1] if isinstance(value, str) else value)
