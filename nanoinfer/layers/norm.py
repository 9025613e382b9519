"""Norms, and the residual sums before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.kernels.operations import operations_of


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    The statistics are float32. x / rms(x) is rounded to x's dtype before the product with the weight, as in Llama.
    """

    neutral_weight = 1.0
    """The weight that leaves the normalised x as it is."""
    offset = False
    """Whether the factor is 1 + weight and the product is rounded once; selects the operation's variant."""
    rounds_once = False
    """Whether the product is rounded once, and x / rms(x) is not."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self._operations = operations_of(device)
        self._variant = dict(offset=self.offset, rounds_once=self.rounds_once)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the norm of x, [..., size], in x's dtype."""
        return self._operations.rms_norm(x, self.weight, self.eps, **self._variant)

    def after_sum(self, x: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        """Add `other` to x, in place, and return the norm of x, in `out` if that is given.

        On CUDA `other` may be the parts of a sum, [parts, N, size] float32.
        """
        return self._operations.rms_norm(x, self.weight, self.eps, **self._variant, other=other, out=out)


class OffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / rms(x), all in float32 and rounded once, as in Gemma."""

    neutral_weight = 0.0
    offset = True


class WideRMSNorm(RMSNorm):
    """weight * x / rms(x), all in float32 and rounded once, as in OLMo 2."""

    rounds_once = True
