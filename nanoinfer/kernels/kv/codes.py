"""Numbers of heads as whole numbers with scales, in plain torch: what formats of codes have in common."""

import torch
from torch import Tensor


def scale_of(largest: Tensor, most: int) -> Tensor:
    """Return largest / most, rounded up to bfloat16, as float32."""
    bits = (largest / most).view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def codes_of(x: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest whole numbers of x over its scales, which broadcast; 0 where a scale is 0."""
    return (x / scales.where(scales > 0, 1.0) + 0.5).floor()


def to_eight(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of heads, [..., head_dim] float32 to int8, and a scale of each, [..., 1] bfloat16."""
    scales = scale_of(x.abs().amax(-1, keepdim=True), 127)
    return codes_of(x, scales).to(torch.int8), scales.bfloat16()


def of_eight(codes: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `to_eight`, in float32. scales: float32."""
    return codes * scales
