"""The models that lie on this machine: in the hub's cache, in LM Studio's and Ollama's folders, and in packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from nanoinfer.gguf.shards import shard_names
from nanoinfer.gguf.sources import PACKAGES, first_shards, is_model, ollama_models, packaged_file, pick_by_tag
from nanoinfer.weights.find import PACKAGED


class Lying(NamedTuple):
    """A model. name: by which commands take it. path: its directory, or its first file in GGUF."""

    name: str
    path: Path

    @property
    def num_bytes(self) -> int:
        if self.path.is_file():
            files = [self.path.with_name(name) for name in shard_names(self.path.name)]
        else:
            files = list(self.path.glob("*.safetensors"))
        return sum(file.stat().st_size for file in files if file.is_file())


def models_here() -> Iterator[Lying]:
    """Yield all of them: those that come along, then by where they lie, and there by name."""
    for name, path in PACKAGED.items():
        if path.is_dir():
            yield Lying(name, path)
    for name in PACKAGES:
        try:
            yield Lying(name, packaged_file(name))
        except ValueError:  # not installed
            continue
    try:
        repositories = [one for one in scan_cache_dir().repos if one.repo_type == "model"]
    except CacheNotFound:
        repositories = []
    for one in sorted(repositories, key=lambda one: one.repo_id):
        newest = max(one.revisions, key=lambda revision: revision.last_modified, default=None)
        if newest is not None:
            yield from _in_folder(one.repo_id, newest.snapshot_path)
    studio = Path(os.path.expanduser("~/.lmstudio/models"))
    for folder in sorted(studio.glob("*/*")):
        yield from _in_folder(str(folder.relative_to(studio)), folder)
    yield from (Lying(name, path) for name, path in ollama_models())


def _in_folder(repository: str, folder: Path) -> Iterator[Lying]:
    """Yield the checkpoint of a repository, and its files in GGUF, by tags where those tell them apart."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield Lying(repository, folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if is_model(path.name))
    for name in first_shards(names):
        tag = name.rpartition("/")[2].partition("-00001-of-")[0].removesuffix(".gguf").rpartition("-")[2]
        try:
            is_told = pick_by_tag(names, tag, repository) == name
        except ValueError:
            is_told = False
        yield Lying(f"{repository}:{tag}" if is_told else str(folder / name), folder / name)
