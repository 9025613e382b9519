"""Tables in which several names mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Meaning = TypeVar("Meaning")


def by_name(table: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return a table whose keys list names, with blanks between, by each name; none stands twice."""
    pairs = [(name, meaning) for names, meaning in table.items() for name in names.split()]
    meanings = dict(pairs)
    assert len(meanings) == len(pairs), f"a name stands twice in a table: {sorted(name for name, _ in pairs)}"
    return meanings
