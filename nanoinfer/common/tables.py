"""Tables in which several names mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Meaning = TypeVar("Meaning")


def by_name(table: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return a table whose keys list names, with blanks between, by each name."""
    return {name: meaning for names, meaning in table.items() for name in names.split()}
