"""AWQ, as AutoAWQ writes it for its "gemm" kernels.

qweight [in_features, num_rows / 8] int32 and qzeros [groups, num_rows / 8] int32 have 8 neighbouring rows in a word, in
an order of their own; scales [groups, num_rows].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import CheckpointTensors, Filling, WeightFormat
from nanoinfer.layers.formats.bits import as_bytes, unpack
from nanoinfer.layers.formats.packed import EXPANDED_AT_ONCE, FLOATS, Packed, checked
from nanoinfer.layers.formats.quantization import Quantization

# Which field of a word has row 0, row 1, and so on.
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class PackedAWQ(Packed):
    """4-bit weights."""

    @classmethod
    def of_scales(
        cls, name: str, tensors: CheckpointTensors, group_size: int | None, has_zeros: bool = True
    ) -> PackedAWQ:
        """Return the format of one projection, whose scales are of the dtype that the files say."""
        scale_dtype = tensors.dtype_of(f"{name}.scales", FLOATS)
        packing = Packing(kind="int", bits=4, scale_dtype=scale_dtype, columns=group_size, has_zeros=has_zeros)
        return cls(packing, name)

    def check_size(self, num_rows: int, in_features: int) -> None:
        for what, size in (("input features", in_features), ("output features", num_rows)):
            if size % 8:
                raise ValueError(f"{self.where}.qweight has {size} {what}, which words of 8 do not divide")
        super().check_size(num_rows, in_features)

    def stored(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        in_features, groups, count = module.in_features, self.packing.num_groups(module.in_features), end - begin

        def fill_codes(words: Tensor) -> None:
            step = 8 * max(1, EXPANDED_AT_ONCE // (8 * in_features))
            for first in range(0, count, step):
                some = words[:, first // 8 : min(first + step, count) // 8]
                module.packed.put_codes(begin + first, _rows(some))

        def fill_zeros(words: Tensor) -> None:
            module.packed.put_zeros(begin, end, _rows(words))

        def fill_scales(scales: Tensor) -> None:
            module.packed.put_scales(begin, end, checked(scales).t())

        int32 = (torch.int32,)
        found = {
            "qweight": Filling(((in_features, count // 8),), int32, fill_codes),
            "scales": Filling(((groups, count),), (self.packing.scale_dtype,), fill_scales),
        }
        if self.packing.has_zeros:
            found["qzeros"] = Filling(((groups, count // 8),), int32, fill_zeros)
        return found


def _rows(words: Tensor) -> Tensor:
    """Return the fields as rows of the weight: [n, m] int32 -> [8 * m, n] uint8."""
    fields = unpack(as_bytes(words), 4, 8 * words.shape[1]).unflatten(1, (-1, 8))
    return fields[..., list(_FIELDS)].flatten(1).t()


class AWQ(Quantization):
    """https://arxiv.org/abs/2306.00978"""

    name = "awq"
    other_names = ("awq_marlin",)

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        super().__init__(settings, tensors)
        self.one_of("bits", (4,), 4)
        version = self.setting("version", str, "gemm")
        if version.lower() != "gemm":
            raise ValueError(f"version is {version!r} in the quantization_config of awq: supported is gemm")
        self._group_size, self._has_zeros = self.group_size(), self.setting("zero_point", bool, True)
        self._left_out = ["lm_head", *self.names("modules_to_not_convert")]

    def is_left_out(self, name: str) -> bool:
        # As AutoAWQ and vLLM: by any part of a name.
        return any(part in name for part in self._left_out)

    def packed(self, name: str) -> WeightFormat:
        return PackedAWQ.of_scales(name, self.tensors, self._group_size, self._has_zeros)
