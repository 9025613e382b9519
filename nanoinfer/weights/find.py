"""Where a model lies, by the name that a user gave it: here, in other programs' folders, or on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import list_repo_files, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from nanoinfer.common.units import counted, format_size
from nanoinfer.gguf.sources import (
    PACKAGES,
    file_in,
    hub_file,
    lm_studio_folder,
    named_file,
    ollama_file,
    packaged_file,
    pick_by_tag,
)
from nanoinfer.models.checkpoints import checkpoint_named
from nanoinfer.weights.addresses import without_address
from nanoinfer.weights.other_kinds import hint_for, refuse_shape, shapes_near, what_it_holds

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_GGUF = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
CONFIG_AND_TOKENIZER = ["*.json", "*.model", "*.txt", "*.jinja"]
# Not *.safetensors: some repositories contain the weights a second time in another layout (consolidated.safetensors).
_WEIGHTS = ["model*.safetensors"]
# Models that are part of the package, by name.
PACKAGED = {"recall": Path(__file__).parent.parent / "recall" / "checkpoint"}


class OnHub(NamedTuple):
    """A model of the Hugging Face hub. tag: of a GGUF file, such as "Q4_K_M"; None: the usual one.

    is_gguf: whether the repository holds GGUF files.
    """

    repository: str
    tag: str | None = None
    is_gguf: bool = False


def find_model(
    model: str | Path,
    *,
    weights: bool = True,
    names: Collection[str] = (),
    say: Callable[[str], None] | None = None,
) -> Path:
    """Return the local directory of a checkpoint, or its GGUF file: `model` itself, a packaged model, or a download.

    Args:
        weights: False downloads only the config and the tokenizer; of GGUF, where they lie with the weights, all.
        names: names that the caller accepts in place of a checkpoint.
        say: gets a line before anything is downloaded: from where, and how much, weights included.

    Raises:
        ValueError: there is no such model, or the hub does not provide it. The message gives the nearest name.
    """
    where = locate(model, names)
    if isinstance(where, Path):
        return where
    if where.is_gguf:
        return _gguf_of(where.repository, where.tag, say)
    try:
        _announce(where.repository, CONFIG_AND_TOKENIZER + _WEIGHTS, say)
        patterns = CONFIG_AND_TOKENIZER + (_WEIGHTS if weights else [])
        return Path(snapshot_download(where.repository, allow_patterns=patterns))
    except Exception as error:  # the client's errors and those of its HTTP library have no common base class
        known_as = "" if str(model) == where.repository else f" ({where.repository})"
        raise ValueError(
            f"model {str(model)!r}{known_as} {_why_not(error, where.repository)}{shapes_near(model, names)}"
        ) from error


def locate(model: str | Path, names: Collection[str] = ()) -> Path | OnHub:
    """Return where a model lies, and download nothing; ValueError: what the name cannot be, with the nearest one."""
    name = str(model)
    path = Path(os.path.expanduser(model))  # which, unlike Path's own, leaves a name of no user as it is
    packaged = PACKAGED.get(name)
    # A directory of that name without a checkpoint, such as the results of an evaluation, must not hide the model.
    if packaged is not None and packaged.is_dir() and not (path / "config.json").is_file():
        return packaged
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        if has_config and any(path.glob("*.safetensors")):
            return path
        if (file := file_in(path)) is None and not has_config:
            raise ValueError(what_it_holds(path))
        return file or path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return named_file(path)
    if (file := ollama_file(name) or packaged_file(name)) is not None:
        return file
    if path.exists():
        raise ValueError(f"model {name!r} is a file: give the directory that holds config.json, or a file of GGUF")
    name = without_address(name)
    if (known := checkpoint_named(name)) is not None:
        return OnHub(known)
    refuse_shape(name)
    if name.lower().endswith(".gguf"):
        raise ValueError(f"model {name!r} does not exist: give the path of a GGUF file, or org/name-GGUF:Q4_K_M")
    match = _HUB_GGUF.fullmatch(name)
    if match is not None and (match[2] or "gguf" in name.lower()):
        return OnHub(match[1], match[2], is_gguf=True)
    if _HUB_ID.fullmatch(name):
        return OnHub(name)
    packaged = [name for name, path in PACKAGED.items() if path.is_dir()]
    raise ValueError(
        f"model {name!r} does not exist{hint_for(name, [*packaged, *PACKAGES, *names])}: give a name such as qwen3-4b, "
        "a directory with config.json, a hub id such as Qwen/Qwen3-4B, a GGUF file"
        + "".join(f", or {name!r}, which comes along" for name in packaged)
        + (f"; a model of Ollama is ollama:{name}" if ":" in name else "")
        + shapes_near(model, names)
        + "; nanoinfer list says what is here"
    )


def _why_not(error: Exception, repository: str) -> str:
    """Return why the hub gives nothing, and what to do."""
    if isinstance(error, GatedRepoError):
        return (
            "has a licence to accept first: accept it at "
            f"https://huggingface.co/{repository}, and set HF_TOKEN to a token of yours"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "is no directory here, and the Hugging Face hub has no such model, or one that needs a token: check the "
            "name, or set HF_TOKEN to a token of yours"
        )
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            "is not here, and the Hugging Face hub cannot be reached: check the network and HF_HUB_OFFLINE, or "
            f"download it elsewhere (hf download {repository} --local-dir DIR) and give that directory"
        )
    said = str(error).strip().partition("\n")[0]
    return (
        f"did not come from the Hugging Face hub ({type(error).__name__}: {said}): check the name, the network "
        "and your access, or give a directory"
    )


def _announce(repository: str, patterns: list[str], say: Callable[[str], None] | None) -> None:
    """Say how much will be downloaded, if that is anything, and can be known."""
    if say is None:
        return
    try:
        files = snapshot_download(repository, allow_patterns=patterns, dry_run=True)
    except Exception:  # the download says why
        return
    missing = [file.file_size or 0 for file in files if file.will_download]
    if missing:
        size = format_size(sum(missing))
        say(f"{repository} of the Hugging Face hub: {size} in {counted(len(missing), 'file')} are downloaded first")


def _gguf_of(repository: str, tag: str | None, say: Callable[[str], None] | None) -> Path:
    """Return the file of a repository with GGUF files: LM Studio's, if it has one of that name, or the hub's."""
    folder = lm_studio_folder(repository)
    if folder is not None and (file := file_in(folder, tag)) is not None:
        return file
    try:
        names = list_repo_files(repository)
    except Exception as error:  # as above; without a network, what was downloaded before is there
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except Exception:
            raise ValueError(f"model {repository!r} {_why_not(error, repository)}") from error
        return folder / pick_by_tag((str(path.relative_to(folder)) for path in folder.rglob("*.gguf")), tag, repository)
    return hub_file(repository, tag, names, lambda files: _download(repository, files, say))


def _download(repository: str, files: list[str], say: Callable[[str], None] | None) -> Path:
    try:
        _announce(repository, files, say)
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:
        raise ValueError(
            f"{files[0]} of {repository} cannot be downloaded ({type(error).__name__}: {error}). Check the network and "
            "the disk"
        ) from error
