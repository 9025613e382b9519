"""Models in several files: the first one names the rest, and has the metadata."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from nanoinfer.common.errors import listed, shown
from nanoinfer.gguf.reader import GGUFFile, read_gguf

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MAX_SHARDS = 1000


def shard_of(name: str) -> tuple[int, int] | None:
    """Return which shard a file is by its name, and of how many; None: it is a whole model."""
    match = _SHARD.fullmatch(name)
    return (int(match[2]), int(match[3])) if match else None


def shard_names(name: str) -> list[str]:
    """Return the names of all shards of a model, by the name of one; the name itself, if it is no shard."""
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match[3]) <= _MAX_SHARDS:
        return [name]
    ending = name[-len(".gguf") :]
    return [f"{match[1]}-{number:05}-of-{match[3]}{ending}" for number in range(1, int(match[3]) + 1)]


def read_model(path: Path) -> GGUFFile:
    """Return what a model's file says, with the tensors of its other shards.

    Raises:
        ValueError: as of `read_gguf`; a shard is missing, is not one of this model, or is not the first.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= _MAX_SHARDS:
        raise ValueError(f"{path} is corrupt (split.count is {count!r}): download it again")
    names = shard_names(path.name)
    if count <= 1:
        return first
    if first.metadata.get("split.no") != 0:
        raise ValueError(f"{path} is not the first of {count} files: give {path.with_name(names[0])}")
    if len(names) != count:
        raise ValueError(f"{path} is one of {count} files, whose names end in -00001-of-{count:05}.gguf: rename it so")
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise ValueError(f"{path} needs files that are not there: {listed(missing)}. Download them, too")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        other = read_gguf(path.with_name(name))
        if (other.metadata.get("split.no"), other.metadata.get("split.count")) != (number, count):
            raise ValueError(f"{other.path} is not file {number + 1} of {count} of this model: download it again")
        if twice := tensors.keys() & other.tensors.keys():
            raise ValueError(f"{other.path} holds {min(twice)}, as a file before it does: download both again")
        tensors |= other.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if type(expected) is not int:
        raise ValueError(f"{path} is corrupt (split.tensors.count is {shown(expected)}): download it again")
    if len(tensors) != expected:
        raise ValueError(f"{path} and its other files hold {len(tensors):,} tensors, {expected:,} are said")
    return replace(first, tensors=tensors)
