"""Map the `quant_method` of a config's quantization_config to what reads it."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, Formats
from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.layers.formats.fp8 import FP8, ModelOpt
from nanoinfer.layers.formats.gptq_awq import AWQ, GPTQ, AutoRound
from nanoinfer.layers.formats.online import Online
from nanoinfer.layers.formats.text_part import TextPart, long_names

FORMATS: dict[str, type[Formats]] = {
    reader.name: reader for reader in (CompressedTensors, GPTQ, AutoRound, AWQ, FP8, ModelOpt)
}
"""By `quant_method`, the class that reads such a checkpoint from its quantization_config and `CheckpointTensors`."""


def formats_of(hf_config: PretrainedConfig) -> Formats:
    """Return the formats of a model's projections, from its config's quantization_config.

    `hf_config.checkpoint_dtypes`, where it is there, has the dtype of each tensor of the checkpoint,
    `hf_config.is_text_part` says that the checkpoint is multimodal, and
    `hf_config.quantised_while_read`, where it is there, `settings` and `quantization` of an `Online`.

    Raises:
        ValueError: it names a method that is not supported, or none, or the method's settings are not supported.
    """
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    found, settings = DENSE, getattr(hf_config, "quantization_config", None)
    if settings:
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in FORMATS:
            raise ValueError(
                f"the config has a quantization_config with quant_method={shown(method)}, which is not supported"
                f"{did_you_mean(str(method), FORMATS)}. Supported: {', '.join(FORMATS)}"
            )
        dtypes, is_part = getattr(hf_config, "checkpoint_dtypes", None), getattr(hf_config, "is_text_part", False)
        if dtypes is not None and is_part:
            dtypes = {long: dtype for name, dtype in dtypes.items() for long in long_names(name)}
        found = FORMATS[method](dict(settings), CheckpointTensors(dtype, dtypes))
        found = TextPart(found, settings) if is_part else found
    online = getattr(hf_config, "quantised_while_read", None)
    return found if online is None else Online(found, *online, dtype)
