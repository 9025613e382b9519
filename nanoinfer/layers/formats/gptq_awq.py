"""GPTQ and AWQ, and AutoRound's checkpoints in their layouts: weights that lie transposed, in words of 32 bits.

GPTQ, as GPTQModel and AutoGPTQ write it: qweight [in_features * bits / 32, num_rows] int32 has neighbouring columns in
a word, qzeros [groups, num_rows * bits / 32] int32 neighbouring rows, scales [groups, num_rows]; g_idx [in_features]
int32 has each column's group. In version 1 every stored zero is one too low; GPTQModel adds the one to whole words, and
so carries a zero beyond the last code into its neighbour.

AWQ, as AutoAWQ writes it for its "gemm" kernels: qweight [in_features, num_rows / 8] int32 and qzeros
[groups, num_rows / 8] int32 have 8 neighbouring rows in a word, in an order of their own; scales [groups, num_rows].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import shown
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import DENSE, FLOATS, CheckpointTensors, Filling, WeightFormat
from nanoinfer.layers.formats.bits import as_bytes, unpack
from nanoinfer.layers.formats.packed import Packed, checked, pieces_of_rows
from nanoinfer.layers.formats.quantization import ACTIVATIONS, Quantization, searches

# One in every field of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}
# Which field of AWQ's words has row 0, row 1, and so on.
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
# What a key of AutoRound's extra_config has if it is no name.
_EXPRESSION = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True)
class PackedTransposed(Packed):
    """Weights whose rows are columns of the checkpoint's tensors.

    Attributes:
        is_awq: whether the words are those of AWQ.
        zeros_count_from_one: whether GPTQ's zeros are stored one too low (version 1).
    """

    is_awq: bool = False
    zeros_count_from_one: bool = True

    def check_size(self, num_rows: int, in_features: int) -> None:
        fields = 32 // self.packing.bits
        for what, size in (("input features", in_features), ("output features", num_rows)):
            if size % fields:
                raise ValueError(f"{self.where}.qweight has {size} {what}, which words of {fields} do not divide")
        if not self.packing.has_group_index:
            super().check_size(num_rows, in_features)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        packing, in_features = self.packing, module.in_features
        fields, groups, count = 32 // packing.bits, packing.num_groups(in_features), end - begin
        one = _ONES[packing.bits] if self.zeros_count_from_one else 0

        def fill_codes(words: Tensor) -> None:
            for rows in pieces_of_rows(count, in_features * module.packed.stacked.numel(), multiple=fields):
                if self.is_awq:
                    codes = _rows_of_awq(words[..., rows.start // fields : rows.stop // fields])
                else:
                    codes = unpack(as_bytes(words[..., rows].mT), packing.bits, in_features)
                module.packed.put_codes(begin + rows.start, codes)

        def fill_zeros(words: Tensor) -> None:
            zeros = _rows_of_awq(words) if self.is_awq else unpack(as_bytes(words + one), packing.bits, count).mT
            module.packed.put_zeros(begin, end, zeros)

        def fill_scales(scales: Tensor) -> None:
            module.packed.put_scales(begin, end, checked(scales).mT)

        check = partial(self.check_finite, module, begin, end)
        shape = (in_features, count // fields) if self.is_awq else (in_features // fields, count)
        fillings = super().views(module, begin, end) | {
            "qweight": Filling((shape,), (torch.int32,), fill_codes),
            "scales": Filling(((groups, count),), (packing.scale_dtype,), fill_scales, check=check),
        }
        if packing.has_zeros:
            fillings["qzeros"] = Filling(((groups, count // fields),), (torch.int32,), fill_zeros)
        return fillings if self.is_awq else fillings | self._of_gptq_alone(module, count)

    def _of_gptq_alone(self, module: nn.Module, count: int) -> dict[str, Filling]:
        in_features, columns = module.in_features, self.packing.columns or module.in_features

        held = getattr(module, "held_columns", None)
        first = 0 if held is None else held.ranges[0][0]

        def check_index(groups_of_columns: Tensor) -> None:
            numbers = torch.arange(first, first + in_features, device=groups_of_columns.device)
            ascending = numbers // columns
            if not bool((groups_of_columns == ascending).all()):
                raise ValueError("is not ascending, although desc_act is false in the quantization_config")

        def fill_bias(values: Tensor) -> None:
            if bool((values != 0).any()):
                raise ValueError("is not zero, and the config says that the projection has no bias")

        index = Filling(((in_features,),), (torch.int32,), check_index, optional=True)
        return {
            "g_idx": self.group_index(module) if self.packing.has_group_index else index,
            # AutoGPTQ wrote biases of zero where a model has none.
            "bias": Filling(((count,),), FLOATS, fill_bias, optional=True),
        }


def _rows_of_awq(words: Tensor) -> Tensor:
    """Return the fields as rows of the weight: [..., n, m] int32 -> [..., 8 * m, n] uint8."""
    fields = unpack(as_bytes(words), 4, 8 * words.shape[-1]).unflatten(-1, (-1, 8))
    return fields[..., list(_AWQ_FIELDS)].flatten(-2).mT


def _transposed(
    name: str,
    tensors: CheckpointTensors,
    bits: int,
    group_size: int | None,
    *,
    is_awq: bool = False,
    has_zeros: bool = True,
    desc_act: bool = False,
    zeros_count_from_one: bool = True,
) -> PackedTransposed:
    packing = Packing(
        kind="int",
        bits=bits,
        scale_dtype=tensors.dtype_of(f"{name}.scales"),
        columns=group_size,
        has_zeros=has_zeros,
        has_group_index=desc_act and group_size is not None,
    )
    return PackedTransposed(packing, name, is_awq, zeros_count_from_one)


class AWQ(Quantization):
    """https://arxiv.org/abs/2306.00978"""

    name = "awq"
    other_names = ("awq_marlin",)

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self.setting("bits", (4,), 4)
        for name in ("version", "format", "checkpoint_format"):  # AutoAWQ and transformers; GPTQModel
            version = self.setting(name, str, "gemm")
            if version.lower() != "gemm":
                raise ValueError(f"{name} is {version!r} in the quantization_config of awq: supported is gemm")
        self._group_size, self._has_zeros = self.group_size(), self.setting("zero_point", bool, True)
        self._left_out = ["lm_head", *self.names("modules_to_not_convert")]

    def of(self, name: str) -> WeightFormat:
        # As AutoAWQ and vLLM: by any part of a name.
        if any(part in name for part in self._left_out):
            return DENSE
        return _transposed(name, self.tensors, 4, self._group_size, is_awq=True, has_zeros=self._has_zeros)


class GPTQ(Quantization):
    """https://arxiv.org/abs/2210.17323"""

    name = "gptq"
    other_names = ("gptq_marlin", "gptqmodel", "marlin")

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self._bits = self.setting("bits", (4, 8), None)
        self._group_size, self._desc_act = self.group_size(), self.setting("desc_act", bool, False)
        stored_as = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
        self._is_first_version = self.setting(stored_as, ("gptq", "gptq_v2"), "gptq") == "gptq"
        self.setting("pack_dtype", ("int32",), "int32")
        self._has_head = self.setting("lm_head", bool, False)
        self._dynamic = self.setting("dynamic", dict, {})
        self._only = self._quantised_endings()

    def _quantised_endings(self) -> list[str] | None:
        """Return the ends of the names of quantised projections; None: all are quantised."""
        parts = self.setting("modules_in_block_to_quantize", list)
        if parts is None:
            return None
        names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"modules_in_block_to_quantize is {shown(parts)} in the quantization_config, not names")
        return names

    def of(self, name: str) -> WeightFormat:
        own, only = self._overrides(name), self._only
        if name == "lm_head":
            is_listed = self._has_head
        else:
            is_listed = only is None or any(name.endswith(f".{ending}") for ending in only)
        if own is None or not is_listed:
            return DENSE
        bits = self.setting("bits", (4, 8), self._bits, own)
        group_size = self.group_size(own, self._group_size)
        desc_act = self.setting("desc_act", bool, self._desc_act, own)
        first = self._is_first_version
        return _transposed(name, self.tensors, bits, group_size, desc_act=desc_act, zeros_count_from_one=first)

    def _overrides(self, name: str) -> dict[str, Any] | None:
        """Return the settings of one projection that differ; None: it is not quantised."""
        for pattern, overrides in self._dynamic.items():
            if pattern.startswith("-:") and searches(pattern[2:], name):
                return None
            if not pattern.startswith("-:") and searches(pattern.removeprefix("+:"), name):
                if not isinstance(overrides, dict):
                    raise ValueError(f"dynamic has {shown(overrides)} in the quantization_config, not settings")
                return overrides
        return {}


class AutoRound(Quantization):
    """https://arxiv.org/abs/2309.05516: in the layout of GPTQ or of AWQ."""

    name = "auto-round"
    other_names = ("auto_round", "intel/auto-round", "inc")
    _LAYOUTS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        backend = self.setting("backend", str, "")
        # Before there was a packing_format this said it. Of "auto_round:exllamav2" zeros are not stored one too low.
        if settings.get("packing_format") is None and backend.startswith("auto_round") and "gptq" not in backend:
            raise ValueError(
                f"backend is {backend!r} in the quantization_config of auto-round, which gives no packing_format: "
                f"supported are {', '.join(self._LAYOUTS)}"
            )
        self._is_awq = "awq" in self.setting("packing_format", self._LAYOUTS, self._LAYOUTS[0])
        self._allowed_bits = (4,) if self._is_awq else (4, 8)
        self._bits, self._group_size = self.setting("bits", self._allowed_bits, None), self.group_size()
        self.setting("data_type", ("int",), "int")
        self._own = self.setting("extra_config", dict, {})
        if self.setting("act_bits", int, 16) < 16:
            self.notice = ACTIVATIONS

    def of(self, name: str) -> WeightFormat:
        own = self._overrides(name)
        if not isinstance(own, dict):
            raise ValueError(f"extra_config has {shown(own)} for {name} in the quantization_config, not settings")
        if (name == "lm_head" and name not in self._own) or own.get("bits", self._bits) == 16:
            return DENSE
        bits = self.setting("bits", self._allowed_bits, self._bits, own)
        group_size = self.group_size(own, self._group_size)
        return _transposed(name, self.tensors, bits, group_size, is_awq=self._is_awq)

    def _overrides(self, name: str) -> Any:
        """Return the settings of one projection that differ: a key of `extra_config` is a name, or an expression."""
        if name in self._own:
            return self._own[name]
        expressions = (key for key in self._own if _EXPRESSION.search(key))
        return next((self._own[key] for key in expressions if searches(f".*?(?:{key})", name)), {})
