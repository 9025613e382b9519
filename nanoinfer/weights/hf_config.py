"""The config that transformers makes of a checkpoint's fields, checked before and after."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.checkpoint import check_config


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """Have no docstrings made of the config classes that are imported meanwhile.

    For one, transformers imports all that generates text and runs on several devices: most of what a plan takes.
    """
    module = sys.modules.get("transformers.utils.auto_docstring")
    before = getattr(module, "auto_class_docstring", None)
    if before is None:  # another version
        yield
        return
    module.auto_class_docstring = lambda cls, *_, **__: cls
    try:
        yield
    finally:
        module.auto_class_docstring = before


def make_config(
    path: Path | str, raw: Mapping[str, Any], model_class: type[Decoder], directory: Path | None = None
) -> PretrainedConfig:
    """Return the config; ValueError, with `path`, if it is not valid. directory: that holds just this as config.json.

    `check_fields` has checked `raw`. No code of the checkpoint runs.
    """
    try:
        # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
        with _without_docstrings():
            if directory is not None:
                hf_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
            else:
                hf_config = transformers.AutoConfig.for_model(**raw)
    except Exception as error:  # transformers uses values before it checks them, so any error is possible
        raise ValueError(f"{path} is no valid config: {error}") from error
    check_config(path, hf_config, model_class)
    return hf_config
