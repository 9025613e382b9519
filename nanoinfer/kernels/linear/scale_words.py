"""How scales of products in float32 lie: in words of 32 bits, each with those of some neighbouring groups.

A scale is a float16 number, or a small integer that counts in the factor of a block, a float16 number, too. With minima
each scale has one of its kind. So a scale of any kind is exact in float32, and so is its product with a code; a kernel
may add the minimum in the same instruction, for only the sum is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaleWords:
    """Attributes:
    bits: of a scale, and of a minimum: 16 are a float16 number; fewer an integer, without a sign where there are
        minima.
    has_minima: whether each scale has a minimum, which is subtracted from the product.
    """

    bits: int
    has_minima: bool = False

    @property
    def groups(self) -> int:
        """The groups of a word."""
        return 32 // (self.bits * (2 if self.has_minima else 1))

    @property
    def has_factors(self) -> bool:
        """Whether scales count in the factor of a block."""
        return self.bits < 16

    def packed(self, scales: Tensor, minima: Tensor | None) -> Tensor:
        """Return words: [..., words * groups] -> [..., words] int32. Numbers of 16 bits, or integers of 8 bits."""
        fields = torch.stack((scales,) if minima is None else (scales, minima), -1).view(torch.uint8).flatten(-2)
        if self.bits == 4:
            fields = fields[..., ::2] | fields[..., 1::2] << 4
        return fields.view(torch.int32)

    def unpacked(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima: [..., words] int32 -> [..., words * groups], float16 or integers of 8 bits."""
        fields = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if self.bits == 4:
            fields = torch.stack((fields & 15, fields >> 4), -1).flatten(-2)
        elif self.bits == 16:
            fields = fields.view(torch.float16)
        elif not self.has_minima:
            fields = fields.view(torch.int8)
        return (fields[..., ::2], fields[..., 1::2]) if self.has_minima else (fields, None)

    def packed_factors(self, factors: Tensor, minima_factors: Tensor | None) -> Tensor:
        """Return a word for each block's float16 factors: [..., blocks] -> [..., blocks] int32.

        A factor by itself lies there in float32, so that its word is copied and read as all others are.
        """
        if minima_factors is None:
            return factors.float().view(torch.int32)
        return torch.stack((factors, minima_factors), -1).view(torch.int32).squeeze(-1)

    def unpacked_factors(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factors of blocks in float32; see `packed_factors`."""
        if not self.has_minima:
            return words.view(torch.float32), None
        scale, minimum = words.unsqueeze(-1).view(torch.float16).float().unbind(-1)
        return scale, minimum
