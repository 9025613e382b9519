"""JSON of large answers, written piece by piece: one call of the `json` module holds Python's lock to its end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

# Iterators are lists whose entries are made as they are written.
encode = json.JSONEncoder(separators=(",", ":"), default=list).encode
PIECE_ENTRIES = 32  # of an iterator, each some 20 objects: some milliseconds of work
_PLAIN_ENTRIES = 4096  # numbers and texts
_TURN_CHARS = 65_536


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value in pieces."""
    if isinstance(value, dict):
        separator = "{"
        for name, one in value.items():
            yield f"{separator}{encode(str(name))}:"
            yield from json_pieces(one)
            separator = ","
        yield "}" if value else "{}"
    elif isinstance(value, Iterator):
        yield from _slices(value, PIECE_ENTRIES)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        separator = "["
        for one in value:
            yield separator
            yield from json_pieces(one)
            separator = ","
        yield "]"
    elif isinstance(value, list):
        yield from _slices(iter(value), _PLAIN_ENTRIES)
    else:
        yield encode(value)


def in_turns(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yield all pieces as one text, and b"" each time when others should have their turn before it goes on."""
    made, num_chars = [], 0
    for piece in pieces:
        made.append(piece)
        num_chars += len(piece)
        if num_chars >= _TURN_CHARS:
            num_chars = 0
            yield b""
    yield "".join(made).encode()


def _slices(entries: Iterator[Any], size: int) -> Iterator[str]:
    separator = "["
    while piece := list(islice(entries, size)):
        yield separator + encode(piece)[1:-1]
        separator = ","
    yield "]" if separator == "," else "[]"
