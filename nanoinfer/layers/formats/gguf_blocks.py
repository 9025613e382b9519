"""The block types of GGUF: what the bytes of a block are, and how their weights are packed.

All functions take blocks, [..., num_bytes] uint8, and return codes [..., columns], and scales [..., groups].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.kernels.linear.scale_words import ScaleWords


@dataclass(frozen=True)
class Values:
    """What blocks hold.

    Attributes:
        codes: uint8, as `Packing` has them.
        scales: float16, or integers that count in factors (uint8 or int8), or exponents of two (uint8).
        minima: likewise; None: there are none.
        factors: of a block, [..., 1] float16: of scales, and of minima; (): there are none.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Block:
    """A type: its columns, bytes and packing, and the function that reads blocks of it."""

    columns: int
    num_bytes: int
    packing: Packing
    values: Callable[[Tensor], Values]


def _halves(blocks: Tensor, begin: int, count: int = 1) -> tuple[Tensor, ...]:
    """Return float16 numbers that lie one after the other, [..., 1] each."""
    return blocks[..., begin : begin + 2 * count].contiguous().view(torch.float16).split(1, -1)


def _fields(values: Tensor, bits: int, neighbours: int) -> Tensor:
    """Return fields of bytes: of so many neighbouring bytes the lowest ones first, [..., n] -> [..., n * 8 / bits]."""
    values = values.unflatten(-1, (-1, neighbours))
    fields = [values >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(fields, -2).flatten(-3)


def _bits_of_columns(values: Tensor) -> Tensor:
    """Return the bits of each byte one after the other: [..., n] -> [..., 8 * n]."""
    return torch.stack([values >> shift & 1 for shift in range(8)], -1).flatten(-2)


def _q8_0(blocks: Tensor) -> Values:
    return Values(blocks[..., 2:] ^ 128, *_halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Values:
    return Values(_fields(blocks[..., 2:], 4, 16), *_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Values:
    scale, least = _halves(blocks, 0, 2)
    return Values(_fields(blocks[..., 4:], 4, 16), scale, -least)


def _q5_0(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., 6:], 4, 16) | _bits_of_columns(blocks[..., 2:6]) << 4
    return Values(codes, *_halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., 8:], 4, 16) | _bits_of_columns(blocks[..., 4:8]) << 4
    scale, least = _halves(blocks, 0, 2)
    return Values(codes, scale, -least)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits, of the 12 bytes that hold them: [..., 12] -> [..., 8] each."""
    scales, minima, rest = blocks.split(4, -1)
    high_scales, high_minima = scales >> 2 & 0x30, minima >> 2 & 0x30
    return (
        torch.cat((scales & 63, rest & 15 | high_scales), -1),
        torch.cat((minima & 63, rest >> 4 | high_minima), -1),
    )


def _q4_k(blocks: Tensor) -> Values:
    return Values(_fields(blocks[..., 16:], 4, 32), *_six_bits(blocks[..., 4:16]), _halves(blocks, 0, 2))


def _q5_k(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4
    return Values(codes, *_six_bits(blocks[..., 4:16]), _halves(blocks, 0, 2))


def _q6_k(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    return Values(codes, blocks[..., 192:208].view(torch.int8), factors=_halves(blocks, 208))


def _q3_k(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., 32:96], 2, 32) | _fields(blocks[..., :32], 1, 32) << 2
    scales = _fields(blocks[..., 96:104], 4, 8) | _fields(blocks[..., 104:108], 2, 4) << 4
    return Values(codes, scales.view(torch.int8) - 32, factors=_halves(blocks, 108))


def _q2_k(blocks: Tensor) -> Values:
    scales = blocks[..., :16]
    return Values(_fields(blocks[..., 16:80], 2, 32), scales & 15, scales >> 4, _halves(blocks, 80, 2))


def _iq4_xs(blocks: Tensor) -> Values:
    high = _fields(blocks[..., 2:4].unsqueeze(-1), 2, 1).flatten(-2)
    low = _fields(blocks[..., 4:8].unsqueeze(-1), 4, 1).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    return Values(_fields(blocks[..., 8:], 4, 16), scales, factors=_halves(blocks, 0))


def _mxfp4(blocks: Tensor) -> Values:
    codes = _fields(blocks[..., 1:], 4, 16)
    return Values(codes.masked_fill(codes == 8, 0), blocks[..., :1])  # GGUF has no negative zero


def _packing(bits: int, columns: int, scale_bits: int, *, has_minima: bool = False, kind: str = "int") -> Packing:
    return Packing(
        kind=kind,
        bits=bits,
        scale_dtype=torch.float32,
        columns=columns,
        scale_words=ScaleWords(scale_bits, has_minima),
        factor_columns=256 if scale_bits < 16 else None,
    )


BLOCKS = {
    "Q8_0": Block(32, 34, _packing(8, 32, 16), _q8_0),
    "Q4_0": Block(32, 18, _packing(4, 32, 16), _q4_0),
    "Q4_1": Block(32, 20, _packing(4, 32, 16, has_minima=True), _q4_1),
    "Q5_0": Block(32, 22, _packing(5, 32, 16), _q5_0),
    "Q5_1": Block(32, 24, _packing(5, 32, 16, has_minima=True), _q5_1),
    "Q4_K": Block(256, 144, _packing(4, 32, 8, has_minima=True), _q4_k),
    "Q5_K": Block(256, 176, _packing(5, 32, 8, has_minima=True), _q5_k),
    "Q6_K": Block(256, 210, _packing(6, 16, 8), _q6_k),
    "Q3_K": Block(256, 110, _packing(3, 16, 8), _q3_k),
    "Q2_K": Block(256, 84, _packing(2, 16, 4, has_minima=True), _q2_k),
    "IQ4_NL": Block(32, 18, _packing(4, 32, 16, kind="iq4"), _q4_0),
    "IQ4_XS": Block(256, 136, _packing(4, 32, 8, kind="iq4"), _iq4_xs),
    "MXFP4": Block(
        32, 17, Packing(kind="fp4", bits=4, scale_dtype=torch.uint8, columns=32, product_dtype=torch.bfloat16), _mxfp4
    ),
}
"""By their names in GGUF."""
