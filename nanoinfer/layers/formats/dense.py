"""Weights as they are: rows of the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import did_you_mean
from nanoinfer.config import QUANTISED
from nanoinfer.layers.formats.base import WeightFormat


class Dense(WeightFormat):
    """weight: [num_rows, in_features] in the model's dtype."""

    def allocate(self, module: nn.Module, num_rows: int, in_features: int, *, dtype: torch.dtype, device) -> None:
        empty = torch.empty(num_rows, in_features, dtype=dtype, device=device)
        module.weight = nn.Parameter(empty, requires_grad=False)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor]:
        return {"weight": module.weight[begin:end]}

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        module.weight.normal_(0.0, 0.02, generator=generator)

    def matrix(self, module: nn.Module) -> Tensor:
        return module.weight

    def check_options(self, quantization: str | None, kv_cache_dtype: str) -> None:
        if quantization is not None:
            raise ValueError(
                f"quantization={quantization!r} does not fit this checkpoint, which is not quantised"
                f"{did_you_mean(quantization, QUANTISED)}: leave it out, give a checkpoint that is, or quantise its "
                f"weights while they are read, with one of {', '.join(QUANTISED)}"
            )

    def lookup(self, module: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, for embeddings: [N] -> [N, in_features]. dtype: the weight's."""
        return torch.nn.functional.embedding(ids, module.weight)


DENSE = Dense()
