"""The tools of a request: what is read of OpenAI's form of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of its arguments; empty: any object.
        is_strict: its arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


def named(tools: Sequence[Tool], name: str) -> Tool | None:
    """Return the tool of this name, if there is one."""
    return next((tool for tool in tools if tool.name == name), None)
