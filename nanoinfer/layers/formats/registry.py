"""Map the `quant_method` of a config's quantization_config to what reads it."""

from __future__ import annotations

from typing import TypeVar

import torch
from transformers import PretrainedConfig

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.layers.formats.base import CheckpointTensors, Formats
from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.layers.formats.dense import DENSE
from nanoinfer.layers.formats.fp8 import FP8
from nanoinfer.layers.formats.gptq_awq import AWQ, GPTQ, AutoRound
from nanoinfer.layers.formats.modelopt import ModelOpt
from nanoinfer.layers.formats.online import Online

Reader = TypeVar("Reader", bound=type[Formats])

_FORMATS: dict[str, type[Formats]] = {
    reader.name: reader for reader in (CompressedTensors, GPTQ, AutoRound, AWQ, FP8, ModelOpt)
}


def register_format(reader: Reader) -> Reader:
    """Class decorator: this class, a `Formats`, reads checkpoints whose quantization_config names it.

    It is called with that quantization_config and `CheckpointTensors`.

    Raises:
        ValueError: the name is taken.
    """
    if reader.name in _FORMATS:
        raise ValueError(f"{reader.name} is already registered, by {_FORMATS[reader.name].__name__}")
    _FORMATS[reader.name] = reader
    return reader


def formats_of(hf_config: PretrainedConfig) -> Formats:
    """The formats of a model's projections, from its config's quantization_config.

    `hf_config.checkpoint_dtypes`, where it is there, has the dtype of each tensor of the checkpoint, and
    `hf_config.quantised_while_read`, where it is there, `settings` and `quantization` of an `Online`.

    Raises:
        ValueError: it names a method that is not supported, or none, or the method's settings are not supported.
    """
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    found, settings = DENSE, getattr(hf_config, "quantization_config", None)
    if settings:
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in _FORMATS:
            raise ValueError(
                f"the config has a quantization_config with quant_method={shown(method)}, which is not supported"
                f"{did_you_mean(str(method), _FORMATS)}. Supported: {', '.join(_FORMATS)}"
            )
        tensors = CheckpointTensors(dtype, getattr(hf_config, "checkpoint_dtypes", None))
        found = _FORMATS[method](dict(settings), tensors)
    online = getattr(hf_config, "quantised_while_read", None)
    return found if online is None else Online(found, *online, dtype)
