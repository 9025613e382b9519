"""The checkpoints of transformers' own fp8, and those of NVIDIA's Model Optimizer."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, WeightFormat
from nanoinfer.layers.formats.quantization import ACTIVATIONS, Quantization, searches
from nanoinfer.layers.formats.scaled import PackedScaled


class FP8(Quantization):
    """fp8 with a float32 scale for each block of 128 x 128, or for each tensor."""

    name = "fp8"
    other_names = ("finegrained_fp8", "deepseek_fp8")
    notice = ACTIVATIONS

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self.setting("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self.setting("activation_scheme", ("dynamic", "static"), "dynamic")
        block = self.setting("weight_block_size", list)
        self._block = None if block is None else self.block("weight_block_size", block)
        self._left_out = ["lm_head", *self.names("modules_to_not_convert"), *self.names("ignored_layers")]

    def of(self, name: str) -> WeightFormat:
        # As transformers: by the whole name, a beginning, or an end of it.
        if any(name.endswith(pattern) or searches(pattern, name) for pattern in self._left_out):
            return DENSE
        ending = "weight_scale_inv" if self._block or self.tensors.has(f"{name}.weight_scale_inv") else "weight_scale"
        return _packed_fp8(name, self.tensors, ending, scale_of_tensor=self._block is None, block=self._block)


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
        self.has_kv_scheme |= self.setting("kv_cache_quant_algo", str, "none") != "none"

    def of(self, name: str) -> WeightFormat:
        if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in self._left_out):
            return DENSE
        if self._algorithm != "NVFP4":
            return _packed_fp8(name, self.tensors, "weight_scale", scale_of_tensor=self._algorithm == "FP8")
        packing = Packing(
            kind="fp4",
            bits=4,
            scale_dtype=torch.float8_e4m3fn,
            columns=16,
            has_global_scale=True,
            product_dtype=torch.float32,
        )
        return PackedScaled(packing, name, torch.uint8, global_scale_name="weight_scale_2")


def _packed_fp8(
    name: str,
    tensors: CheckpointTensors,
    scales_name: str,
    *,
    scale_of_tensor: bool,
    block: tuple[int, int] | None = None,
) -> PackedScaled:
    """Return the format of one projection. block: rows and columns that share a scale; None: all, or a row each.

    Products with scales are float32, whatever the scales' dtype.
    """
    rows, columns = block or (1, None)
    scale_dtype = tensors.dtype_of(f"{name}.{scales_name}", torch.float32)
    packing = Packing(
        kind="fp8", bits=8, scale_dtype=scale_dtype, rows=rows, columns=columns, product_dtype=torch.float32
    )
    return PackedScaled(packing, name, torch.float8_e4m3fn, scale_of_tensor, scales_name=scales_name)
