"""MXFP4 as gpt-oss has it: experts in 4-bit floating point, with a power of two for every 32 columns."""

from __future__ import annotations

from typing import Any

from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, WeightFormat
from nanoinfer.layers.formats.compressed_tensors import packed_fp4
from nanoinfer.layers.formats.quantization import Quantization, searches


class MXFP4(Quantization):
    """Experts are packed, but for those that the config leaves out; nothing else is, whatever the config says."""

    name = "mxfp4"
    has_like_experts = True

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self._left_out = self.names("modules_to_not_convert")

    def of(self, name: str) -> WeightFormat:
        module, is_expert, _ = name.partition(".experts.")
        is_left_out = any(searches(pattern, module) or module.endswith(pattern) for pattern in self._left_out)
        return packed_fp4(name, "mxfp4-pack-quantized") if is_expert and not is_left_out else DENSE
