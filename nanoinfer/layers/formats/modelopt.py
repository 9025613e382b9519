"""The checkpoints of NVIDIA's Model Optimizer."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import CheckpointTensors, WeightFormat
from nanoinfer.layers.formats.dense import DENSE
from nanoinfer.layers.formats.fp8 import packed_fp8
from nanoinfer.layers.formats.quantization import ACTIVATIONS, Quantization, kv_cache_dtype_of
from nanoinfer.layers.formats.scaled import PackedScaled


class ModelOpt(Quantization):
    """fp8 with a scale for each tensor or row, or NVFP4, whose scales are multiplied by that of the tensor."""

    name = "modelopt"
    other_names = ("modelopt_fp4", "modelopt_fp8", "nvfp4")
    notice = ACTIVATIONS

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self._algorithm = self.setting("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"), None)
        self._left_out = [*self.names("ignore"), *self.names("exclude_modules")]
        if self._algorithm == "NVFP4":
            self.setting("group_size", (16,), 16)
        if self.setting("kv_cache_quant_algo", ("FP8", "none"), "none") == "FP8":
            self.kv_cache_dtype = "fp8"
        if kv_cache := self.setting("kv_cache_scheme", dict):
            self.kv_cache_dtype = kv_cache_dtype_of(kv_cache)

    def of(self, name: str) -> WeightFormat:
        if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in self._left_out):
            return DENSE
        if self._algorithm != "NVFP4":
            return packed_fp8(name, self.tensors, "weight_scale", scale_of_tensor=self._algorithm == "FP8")
        packing = Packing(
            kind="fp4",
            bits=4,
            scale_dtype=torch.float8_e4m3fn,
            columns=16,
            has_global_scale=True,
            product_dtype=torch.float32,
        )
        return PackedScaled(packing, name, torch.uint8, global_scale_name="weight_scale_2")
