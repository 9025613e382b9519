"""The config that transformers makes of a checkpoint's fields, checked before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.checkpoint import check_config


def make_config(
    path: Path | str, raw: Mapping[str, Any], model_class: type[Decoder], directory: Path | None = None
) -> PretrainedConfig:
    """Return the config; ValueError, with `path`, if it is not valid. directory: that holds just this as config.json.

    `check_fields` has checked `raw`. No code of the checkpoint runs.
    """
    try:
        # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
        if directory is not None:
            hf_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        else:
            hf_config = transformers.AutoConfig.for_model(**raw)
    except Exception as error:  # transformers uses values before it checks them, so any error is possible
        raise ValueError(f"{path} is no valid config: {error}") from error
    check_config(path, hf_config, model_class)
    return hf_config
