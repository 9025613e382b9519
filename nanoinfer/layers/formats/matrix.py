"""Formats whose products are those of a matrix in the model's dtype."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.counts import num_parts
from nanoinfer.layers.formats.base import WeightFormat
from nanoinfer.layers.norm import RMSNorm


class MatrixFormat(WeightFormat):
    """A format that multiplies with a matrix, so that equal matrices give equal bits, however they are held.

    `library_counts` of a module are the row counts at which the library gives our kernels' bits on CUDA; see
    `nanoinfer.execution.products`.
    """

    @abstractmethod
    def matrix(self, module: nn.Module) -> Tensor:
        """Return the weight: [num_rows, in_features], packed. It may lie in a buffer that the next call overwrites."""

    def project(self, module: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight = self.matrix(module)
        return module.operations.linear(x, weight, module.bias, out=out, library_counts=module.library_counts)

    def project_gated(self, module: nn.Module, x: Tensor, activation: str) -> Tensor | None:
        operations = module.operations
        if not operations.has_activation(activation, x):  # asked first: a matrix would be expanded in vain
            return None
        counts = module.library_counts
        return operations.linear(x, self.matrix(module), module.bias, activation=activation, library_counts=counts)

    def project_add_norm(self, module: nn.Module, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        parts = self.num_parts(module)
        if parts == 1 or y.element_size() != 2:
            return norm.after_sum(x, self.project(module, y))
        weight = self.matrix(module)
        # The result is allocated before the parts. Behind them it would leave a hole where they lay, and what a gated
        # layer allocates next would not fit into the rest.
        out = torch.empty_like(x)
        found = module.operations.linear_parts(y, weight, parts, library_counts=module.library_counts)
        return norm.after_sum(x, found, out)

    def num_parts(self, module: nn.Module) -> int:
        """Return the number of parts of the sums in `project_add_norm` on CUDA, in bfloat16 and float16."""
        return 1 if module.bias is not None else num_parts(module.in_features)


class ExpandedFormat(MatrixFormat):
    """A format whose matrix is written for each product, into the buffer that all modules share."""

    @abstractmethod
    def expand_into(self, module: nn.Module, out: Tensor) -> None:
        """Write the weight as a matrix to `out`, [num_rows, in_features] in the model's dtype."""

    def matrix(self, module: nn.Module) -> Tensor:
        out = module.scratch[: module.num_rows * module.in_features].view(module.num_rows, module.in_features)
        self.expand_into(module, out)
        return out

    def scratch_size(self, module: nn.Module, has_kernels: bool) -> int:
        return module.num_rows * module.in_features
