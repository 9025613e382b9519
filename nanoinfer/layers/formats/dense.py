"""Weights as they are: rows of the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.counts import num_parts
from nanoinfer.layers.formats.base import WeightFormat
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.weight import empty_weight


class Dense(WeightFormat):
    """weight: [num_rows, in_features] in the model's dtype.

    `library_counts` of a module are the row counts at which the library gives our kernels' bits on CUDA; see
    `nanoinfer.execution.products`.
    """

    name = "dense"

    def allocate(self, module: nn.Module, num_rows: int, in_features: int, *, dtype: torch.dtype, device) -> None:
        module.weight = empty_weight(num_rows, in_features, dtype=dtype, device=device)
        module.library_counts = frozenset()

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor]:
        return {"weight": module.weight[begin:end]}

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        module.weight.normal_(0.0, 0.02, generator=generator)

    def project(self, module: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        return module.operations.linear(x, module.weight, module.bias, out=out, library_counts=module.library_counts)

    def lookup(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return rows of the weight, for embeddings: [N] -> [N, in_features]."""
        return torch.nn.functional.embedding(ids, module.weight)

    def project_gated(self, module: nn.Module, x: Tensor, activation: str) -> Tensor | None:
        return module.operations.gated_linear(
            x, module.weight, module.bias, activation, library_counts=module.library_counts
        )

    def project_add_norm(self, module: nn.Module, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        parts = self.num_parts(module)
        if parts == 1 or y.element_size() != 2:
            return norm.after_sum(x, self.project(module, y))
        return norm.after_sum(
            x, module.operations.linear_parts(y, module.weight, parts, library_counts=module.library_counts)
        )

    def num_parts(self, module: nn.Module) -> int:
        """Return the number of parts of the sums in `project_add_norm` on CUDA, in bfloat16 and float16."""
        return 1 if module.bias is not None else num_parts(module.weight.shape[1])


DENSE = Dense()
