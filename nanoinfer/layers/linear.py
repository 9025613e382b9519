"""Projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common import exact
from nanoinfer.kernels.linear.counts import num_parts
from nanoinfer.layers.fused import fused_kernels
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.weight import empty_weight


class Linear(nn.Module):
    """x @ weight.T + bias, for one or more projections of the same input, merged along the output.

    out_features: output features of each projection, by its name in the checkpoint. Their rows lie in this order in
    weight [sum(out_features), in_features] and bias [sum(out_features)]. A projection alone may be given as a number.
    """

    def __init__(
        self, in_features: int, out_features: int | dict[str, int], *, bias: bool, dtype: torch.dtype, device
    ) -> None:
        super().__init__()
        self.parts = out_features if isinstance(out_features, dict) else None
        num_rows = sum(self.parts.values()) if self.parts else out_features
        self.weight = empty_weight(num_rows, in_features, dtype=dtype, device=device)
        self.bias = empty_weight(num_rows, dtype=dtype, device=device) if bias else None
        self.library_counts: frozenset[int] = frozenset()
        """Numbers of rows at which, on CUDA, the library gives our kernels' bits; see
        `nanoinfer.execution.products`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, library_counts=self.library_counts)

    def added_to(self, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        """The norm of x, to which the projection of y was added, in place."""
        parts = self.num_parts
        if parts == 1 or not y.is_cuda or y.element_size() != 2:
            return norm.after_sum(x, self(y))
        return norm.after_sum(
            x, fused_kernels().linear_parts(y, self.weight, parts, library_counts=self.library_counts)
        )

    @property
    def num_parts(self) -> int:
        """Parts of the sums of `added_to` on CUDA, in bfloat16 and float16."""
        return 1 if self.bias is not None else num_parts(self.weight.shape[1])


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    library_counts: frozenset[int] = frozenset(),
) -> Tensor:
    """x @ weight.T + bias: the bits of a row depend on nothing but the row, the weight and the bias.

    x: [N, in_features]; weight: [num_rows, in_features]; out: [N, num_rows], for the result.
    """
    if x.is_cuda:
        return fused_kernels().linear(x, weight, bias, out=out, library_counts=library_counts)
    result = exact.linear(x, weight, bias)
    return result if out is None else out.copy_(result)
