"""The config that transformers makes of a checkpoint's fields, checked before and after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.checkpoint import check_config


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Have config classes imported without what takes long of it and nobody reads.

    For a docstring of one, transformers imports all that generates text and runs on several devices: most of what a
    plan takes. And when it is asked for its first model, it looks through the files of all of them, as it has done when
    it was imported itself; what it found it keeps by the folder's path, and asks for by a file's.
    """
    utils = "transformers.utils"
    with (
        _replaced(f"{utils}.auto_docstring", "auto_class_docstring", lambda _: lambda cls, *_, **__: cls),
        _replaced(
            f"{utils}.import_utils", "create_import_structure_from_path", lambda own: lambda at: own(_folder(at))
        ),
    ):
        yield


def _folder(path: Path | str) -> Path:
    return Path(path).parent if Path(path).is_file() else Path(path)


@contextmanager
def _replaced(module_name: str, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Have another function in a module meanwhile, made of its own, if this version of it has one."""
    module = sys.modules.get(module_name)
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, other(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def make_config(
    path: Path | str, raw: Mapping[str, Any], model_class: type[Decoder], directory: Path | None = None
) -> PretrainedConfig:
    """Return the config; ValueError, with `path`, if it is not valid. directory: that holds just this as config.json.

    `check_fields` has checked `raw`. No code of the checkpoint runs.
    """
    try:
        # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
        with _quick_imports():
            if directory is not None:
                hf_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
            else:
                hf_config = transformers.AutoConfig.for_model(**raw)
    except Exception as error:  # transformers uses values before it checks them, so any error is possible
        raise ValueError(f"{path} is no valid config: {error}") from error
    check_config(path, hf_config, model_class)
    return hf_config
