"""Map the `quant_method` of a config's quantization_config to what reads it."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, Formats
from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.layers.formats.fp8 import FP8, ModelOpt
from nanoinfer.layers.formats.gguf import GGUF
from nanoinfer.layers.formats.gptq_awq import AWQ, GPTQ, AutoRound
from nanoinfer.layers.formats.mxfp4 import MXFP4
from nanoinfer.layers.formats.text_part import TextPart

FORMATS: dict[str, type[Formats]] = {
    reader.name: reader for reader in (CompressedTensors, GPTQ, AutoRound, AWQ, FP8, ModelOpt, MXFP4, GGUF)
}
"""By `quant_method`, the class that reads such a checkpoint from its quantization_config and `CheckpointTensors`."""


def formats_of(settings: dict[str, Any], tensors: CheckpointTensors, is_text_part: bool = False) -> Formats:
    """Return the formats of a model's projections.

    settings: the config's quantization_config; {}: there is none. is_text_part: the checkpoint is multimodal.

    Raises:
        ValueError: it names a method that is not supported, or none, or the method's settings are not supported.
    """
    if not settings:
        return DENSE
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(
            f"the config has a quantization_config with quant_method={shown(method)}, which is not supported"
            f'{did_you_mean(str(method), FORMATS)}: give the checkpoint in 16 bits, with quantization="int4", or one '
            f"of {', '.join(FORMATS)}"
        )
    formats = FORMATS[method](dict(settings), tensors)
    return TextPart(formats, settings) if is_text_part else formats
