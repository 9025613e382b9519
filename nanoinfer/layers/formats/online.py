"""Wide checkpoints whose weights are quantised while they are read.

The weights lie, and are filled, as those of a compressed-tensors checkpoint with the same settings: what such a
checkpoint would hold is worked out (`schemes.quantise`) and given to what reads it. So both have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.shard import ranges_of
from nanoinfer.layers.formats.base import DENSE, FLOATS, CheckpointTensors, Filling, Formats, WeightFormat
from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.layers.formats.scaled import PackedScaled
from nanoinfer.layers.formats.schemes import quantise


@dataclass(frozen=True)
class QuantisedWhileRead(PackedScaled):
    """Weights as `PackedScaled` holds them, from a wide tensor in the checkpoint."""

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Filling]:
        shape, stored = (end - begin, module.in_features), super().views(module, begin, end)
        several, held = module.packed.stacked, getattr(module, "held_columns", None)
        if held is not None:  # a row is quantised as a whole, of which a rank has some columns
            shape = shape[0], held.total

        def fill(pieces: Iterable[Tensor]) -> None:
            for ending, values in quantise(pieces, (*several, *shape), self, module.packed.codes.device).items():
                own = tuple(values.shape[len(several) :])
                if held is not None and own not in stored[ending].shapes:
                    dim, ranges = ranges_of(own, stored[ending].shapes[0], held)
                    dim += len(several)
                    values = torch.cat([values.narrow(dim, low, high - low) for low, high in ranges], dim)
                    own = tuple(values.shape[len(several) :])
                assert own in stored[ending].shapes and values.dtype in stored[ending].dtypes, ending
                stored[ending].take([values])

        return {"weight": Filling((shape,), FLOATS, fill, by_rows=True, check=stored[self.scales_name].check)}


class Online(Formats):
    """The formats of a checkpoint of which some weights, which are wide there, are quantised while they are read.

    Args:
        base: the formats of the checkpoint as it is.
        settings: the quantization_config that the checkpoint would have if these weights were quantised.
        quantization: the name by which the user asked for it; None: for the head alone.
        dtype: the checkpoint's.
    """

    def __init__(self, base: Formats, settings: dict[str, Any], quantization: str | None, dtype: torch.dtype) -> None:
        self._base, self._quantization, self.notice = base, quantization, base.notice
        self.has_kv_scheme = base.has_kv_scheme
        self._quantised = CompressedTensors(settings, CheckpointTensors(dtype))
        self.has_like_experts = base.has_like_experts  # the settings name projections by the ends of their names
        self.of = cache(self.of)

    def of(self, name: str) -> WeightFormat:
        return self._either(self._quantised.of(name), self._base.of(name), name)

    def of_embeddings(self, name: str) -> WeightFormat:
        return self._either(self._quantised.of_embeddings(name), self._base.of_embeddings(name), name)

    def check_quantization(self, quantization: str | None) -> None:
        self._base.check_quantization(None if quantization == self._quantization else quantization)

    def _either(self, quantised: WeightFormat, base: WeightFormat, name: str) -> WeightFormat:
        if not isinstance(quantised, PackedScaled):
            return base
        if base is not DENSE:
            raise ValueError(
                f"{name} is quantised in the checkpoint already, so it cannot be quantised while it is read: leave out "
                "head_quantization"
            )
        return QuantisedWhileRead(**vars(quantised))
