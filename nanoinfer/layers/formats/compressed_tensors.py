"""The checkpoints of llm-compressor: https://github.com/vllm-project/compressed-tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from nanoinfer.common.errors import shown
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, WeightFormat
from nanoinfer.layers.formats.quantization import ACTIVATIONS, Quantization, searches
from nanoinfer.layers.formats.scaled import PackedScaled

_MIXED = "mixed-precision"
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
# Strategies of which the reference packs zeros, where it packs codes.
_PACKS_ZEROS = ("group", "channel")
# Names of the class of projections, and of the classes that it derives from.
_CLASSES = ("Linear", "Module")
# Targets of head and embeddings alone, and what weights of one kind are called.
_HEAD = re.compile(r".*(lm_head|embed_tokens)\$?|Embedding")
_SCHEME_NAMES = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}


class CompressedTensors(Quantization):
    """A group of the config holds for the modules that its targets name, by name, regular expression or class."""

    name = "compressed-tensors"
    other_names = ("compressed_tensors",)

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self._format = self.setting("format", (*_FORMATS, _MIXED, "dense"), "dense")
        self.setting("quantization_status", ("compressed",), "compressed")
        sparsity = self.setting("sparsity_config", dict, {})
        if sparsity.get("format", "dense") != "dense":
            raise ValueError(f"sparsity_config is not supported in the quantization_config: it has {shown(sparsity)}")
        groups = self.setting("config_groups", dict, {})
        self._groups: dict[str, dict[str, Any]] = {}
        for group in groups.values():
            if not isinstance(group, dict):
                raise ValueError(f"config_groups has {shown(group)} in the quantization_config, not settings")
            self._groups |= dict.fromkeys(self.names("targets", group), group)
        # In this order: names win over regular expressions, and these over classes.
        self._targets = sorted(self._groups, key=lambda target: ("re:" in target, target))
        self._ignored = self.names("ignore")
        self._made: dict[tuple[int, torch.dtype | None], PackedScaled] = {}
        if any(group.get("input_activations") for group in self._groups.values()):
            self.notice = ACTIVATIONS

    def of(self, name: str) -> WeightFormat:
        return self._find(name, _CLASSES)

    def of_embeddings(self, name: str) -> WeightFormat:
        # Older versions of the reference left embeddings wide, whatever expressions matched their name.
        is_wide = self.tensors.dtypes is not None and not self.tensors.has(f"{name}.weight_scale")
        weights = DENSE if is_wide else self._find(name, ("Embedding",))
        if isinstance(weights, PackedScaled) and (weights.packing.rows > 1 or weights.scale_of_tensor):
            raise ValueError(
                f"{name} has scales for several rows in the quantization_config: embeddings need their own"
            )
        return weights

    def scheme_names(self) -> tuple[str, ...]:
        groups = {target: group for target, group in self._groups.items() if not _HEAD.fullmatch(target)}
        all_weights = [self.setting("weights", dict, None, group) or {} for group in groups.values()]
        schemes = {_SCHEME_NAMES.get((weights.get("type"), weights.get("num_bits"))) for weights in all_weights}
        if len(schemes) > 1 or not schemes or None in schemes:
            return ()
        is_symmetric = all(self.setting("symmetric", bool, True, weights) for weights in all_weights)
        return ("int4", "int4-symmetric") if schemes == {"int4"} and is_symmetric else tuple(schemes)

    def _find(self, name: str, classes: tuple[str, ...]) -> WeightFormat:
        """Return the format of a module of these classes."""
        if any(_matches(pattern, name) or pattern in classes for pattern in self._ignored):
            return DENSE
        targets = [target for target in self._targets if _matches(target, name)]
        targets += [target for target in self._targets if target in classes]
        group = self._groups[targets[0]] if targets else {}
        weights = self.setting("weights", dict, None, group)
        if weights is None:
            return DENSE
        # Thousands of experts in one group differ in their names alone, so one format is made for all.
        kind = id(group), (self.tensors.dtypes or {}).get(f"{name}.weight_scale")
        if kind not in self._made:
            self._made[kind] = self._format_of(name, group, weights)
        return replace(self._made[kind], where=name)

    def _format_of(self, name: str, group: dict[str, Any], weights: dict[str, Any]) -> PackedScaled:
        kind = self.setting("type", ("int", "float"), "int", weights)
        bits = self.setting("num_bits", (4, 8), 8, weights)
        is_symmetric = self.setting("symmetric", bool, True, weights)
        group_size = weights.get("group_size")
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        strategy = self.setting("strategy", ("tensor", "channel", "group", "tensor_group", "block"), strategy, weights)
        stored_as = _infer_format(group, weights) if self._format == _MIXED else self._format
        stored_as = self.setting("format", _FORMATS, stored_as, group)
        if kind == "float" and not is_symmetric:
            raise ValueError(
                "weights of type float have zero points in the quantization_config, which is not supported"
            )
        if kind == "float" and bits == 4:
            fp4 = packed_fp4(name, stored_as)
            self.setting("group_size", (fp4.packing.columns,), fp4.packing.columns, weights)
            return fp4
        is_packed = stored_as == "pack-quantized"
        if stored_as.startswith(("nvfp4", "mxfp4")) or (is_packed and kind == "float"):
            raise ValueError(f"format is {stored_as} for {bits} bits of type {kind} in the quantization_config")
        rows, columns = 1, None
        if strategy == "block":
            block = weights.get("block_structure")
            block = [int(size) for size in block.split("x") if size.isdecimal()] if isinstance(block, str) else block
            rows, columns = self.block("block_structure", block)
        elif strategy in ("group", "tensor_group"):
            columns = self.group_size(weights, default=None)
        packing = Packing(
            kind="fp8" if kind == "float" else "int",
            bits=bits if is_packed else 8,
            scale_dtype=self.tensors.dtype_of(f"{name}.weight_scale"),
            columns=columns,
            rows=rows,
            has_zeros=not is_symmetric,
            has_group_index=columns is not None and weights.get("actorder") in (True, "group", "dynamic"),
        )
        words = torch.int32 if is_packed else torch.float8_e4m3fn if kind == "float" else torch.int8
        codes_name = "weight_packed" if is_packed else "weight"
        zeros_in_words = is_packed and strategy in _PACKS_ZEROS
        return PackedScaled(packing, name, words, strategy == "tensor", codes_name, has_zeros_in_words=zeros_in_words)


def packed_fp4(name: str, stored_as: str) -> PackedScaled:
    """Return the format of 4-bit floating-point numbers; ValueError if they are not stored in a known way."""
    kind = dict(kind="fp4", bits=4)
    if stored_as == "mxfp4-pack-quantized":
        kind |= dict(product_dtype=torch.bfloat16)  # which has these products
        packing, global_scale_name = Packing(scale_dtype=torch.uint8, columns=32, **kind), None
    elif stored_as == "nvfp4-pack-quantized":
        # The reference rounds to bfloat16, whatever the model computes in.
        kind |= dict(product_dtype=torch.float32, result_dtype=torch.bfloat16)
        kind |= dict(has_global_scale=True, divides_global_scale=True)
        packing = Packing(scale_dtype=torch.float8_e4m3fn, columns=16, **kind)
        global_scale_name = "weight_global_scale"
    else:
        raise ValueError(f"format is {stored_as} for 4 bits of type float in the quantization_config")
    return PackedScaled(packing, name, torch.uint8, codes_name="weight_packed", global_scale_name=global_scale_name)


def _matches(target: str, name: str) -> bool:
    return searches(target[3:], name) if target.startswith("re:") else target == name


def _infer_format(group: dict[str, Any], weights: dict[str, Any]) -> str:
    """Return the format of a group that does not say it, as the reference infers it."""
    is_weight_only = not group.get("input_activations")
    if weights.get("type") != "float":
        return "pack-quantized" if is_weight_only else "int-quantized"
    if weights.get("num_bits") == 4:
        return "mxfp4-pack-quantized" if weights.get("group_size") == 32 else "nvfp4-pack-quantized"
    return "naive-quantized" if is_weight_only else "float-quantized"
