"""How small integers lie in words: fields of 4 or 8 bits, the lowest first."""

from __future__ import annotations

import torch
from torch import Tensor

# Magnitudes of 4-bit floating-point numbers (e2m1) by their lower three bits; the fourth is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))


def row_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` packed fields, in whole words of 32 bits."""
    return -(-count * bits // 32) * 4


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` fields of each row: [..., bytes] uint8 -> [..., count] uint8."""
    assert bits in (4, 8), f"no fields of {bits} bits"
    if bits == 8:
        return packed[..., :count]
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pack(values: Tensor, bits: int) -> Tensor:
    """Return the fields of each row in bytes: [..., count] uint8, below 2**bits -> [..., count * bits // 8] uint8."""
    assert bits in (4, 8), f"no fields of {bits} bits"
    return values if bits == 8 else values[..., ::2] | values[..., 1::2] << 4


def as_words(packed: Tensor) -> Tensor:
    """Return bytes as words of 32 bits: [..., 4 * m] uint8 -> [..., m] int32."""
    return packed.reshape(-1).view(torch.int32).view(*packed.shape[:-1], packed.shape[-1] // 4)


def as_bytes(words: Tensor) -> Tensor:
    """Return words of 32 bits as bytes, the lowest first: [..., n] int32 -> [..., 4 * n] uint8; bytes as they are."""
    # As one row whose stride is 1: of a dimension of size 1 torch keeps any stride, and then does not view it as bytes.
    row = words.reshape(-1).contiguous().as_strided((words.numel(),), (1,))
    return row.view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * words.element_size())
