"""Norms, and the residual sums before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common import exact
from nanoinfer.layers.fused import fused_kernels
from nanoinfer.layers.weight import empty_weight


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    The statistics are float32. x / rms(x) is rounded to x's dtype before the product with the weight, as in Llama.
    """

    neutral_weight = 1.0
    """The weight that leaves the normalised x as it is."""
    offset = False
    """Whether the factor is 1 + weight and the product is rounded once; selects the kernel's variant."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return fused_kernels().rms_norm(x, self.weight, self.eps, offset=self.offset)
        return self.norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, other: Tensor) -> Tensor:
        """Add `other` to x, in place, and return the norm of x.

        On CUDA `other` may be the parts of a sum, [parts, N, size] float32.
        """
        if x.is_cuda:
            return fused_kernels().rms_norm(x, self.weight, self.eps, offset=self.offset, other=other)
        x += other
        return self.norm(x, self.weight, self.eps)

    @staticmethod
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of x, [..., size]; the weight broadcasts to x."""
        return weight * _over_rms(x, eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / rms(x), all in float32 and rounded once, as in Gemma."""

    neutral_weight = 0.0
    offset = True

    @staticmethod
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (_over_rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _over_rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * exact.elementwise(torch.rsqrt, x.pow(2).mean(-1, keepdim=True) + eps)
