"""Keys and values as whole numbers of 8 or 4 bits with scales of 16, on every card.

A scale is the largest number of its group over the largest code, rounded up to bfloat16, whose range is that of the
model's numbers: no code is cut. Codes of 8 bits have a scale for each head, those of 4 bits one for every 32 numbers of
it. Where keys are in 4 bits, keys and queries are turned by a Hadamard matrix behind the rotary embedding, which leaves
their products as they are: a channel that is much larger than others would cost all of its group their bits. (QuaRot,
Ashkboos et al., 2024; llama.cpp and vLLM store KV so.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.kv.base import Field, KVFormat, KVKernels
from nanoinfer.kernels.kv.codes import codes_of, of_eight, scale_of, to_eight
from nanoinfer.kernels.kv.one_vector import OneVectorInt8

GROUP = 32
"""Numbers that share a scale, of codes of 4 bits. Where a head is no multiple of it, its last group has fewer."""


@dataclass(frozen=True)
class Quantised(KVFormat):
    """Codes of keys, of values, then the scales of each; two scales of 8 bits lie side by side, for one load.

    Attributes:
        label: what `kv_cache_dtype` calls it.
        key_bits, value_bits: 8 or 4.
    """

    label: str
    key_bits: int
    value_bits: int

    @property
    def name(self) -> str:
        return self.label

    @property
    def turns(self) -> bool:
        """Whether keys and queries are turned."""
        return self.key_bits == 4

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        codes = [Field(head_dim * bits // 8, torch.int8 if bits == 8 else torch.uint8) for bits in self.bits]
        if self.bits == (8, 8):
            return *codes, Field(2, torch.bfloat16)
        return *codes, *(Field(1 if bits == 8 else -(-head_dim // GROUP), torch.bfloat16) for bits in self.bits)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        pairs = [(to_eight if bits == 8 else _to_four)(x.float()) for x, bits in zip((k, v), self.bits, strict=True)]
        scales = [scales for _, scales in pairs]
        return *(codes for codes, _ in pairs), *([torch.cat(scales, -1)] if self.bits == (8, 8) else scales)

    def decode(self, fields: tuple[Tensor, ...], positions: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        scales = fields[2].split(1, -1) if self.bits == (8, 8) else fields[2:]
        pairs = zip(fields[:2], scales, self.bits, strict=True)
        k, v = ((of_eight if bits == 8 else _of_four)(codes, scales.float()) for codes, scales, bits in pairs)
        return k, v

    def of_one_vector(self, dtype: torch.dtype) -> KVFormat:
        return OneVectorInt8(dtype) if self.bits == (8, 8) else self

    def turn(self, heads: Tensor) -> Tensor:
        return hadamard(heads.float()).to(heads.dtype) if self.turns else heads

    def kernels(self) -> KVKernels:
        from nanoinfer.kernels.kv import quantized_kernels as own

        store, read = {
            (8, 8): (own.store_8_8, own.read_8_8),
            (8, 4): (own.store_8_4, own.read_8_4),
            (4, 4): (own.store_4_4, own.read_4_4),
        }[self.bits]
        return KVKernels(store, read, stores_heads=True, turn=own.hadamard if self.turns else None)

    @property
    def bits(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.key_bits, self.value_bits


def int8() -> KVFormat:
    """kv_cache_dtype="int8": half the bytes of 16 bits."""
    return Quantised("int8", 8, 8)


def k8v4() -> KVFormat:
    """kv_cache_dtype="k8v4": two fifths of them."""
    return Quantised("k8v4", 8, 4)


def int4() -> KVFormat:
    """kv_cache_dtype="int4": less than three tenths."""
    return Quantised("int4", 4, 4)


def hadamard_size(head_dim: int) -> int:
    """Return the size of the Hadamard matrix that turns the parts of a head: the largest power of two that divides."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Multiply parts of the last dimension with the Hadamard matrix of their size, over its root. x: float32.

    Sylvester's matrix, one bit of the index after the other, the highest first.
    """
    size = hadamard_size(x.shape[-1])
    parts = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        first, second = parts.unflatten(-1, (2, size // 2)).unbind(-2)
        parts = torch.stack((first + second, first - second), -1).flatten(-2)
    return (parts * size**-0.5).flatten(-2)


def _to_four(x: Tensor) -> tuple[Tensor, Tensor]:
    """A byte has the code of a number of the head's first half, and that of the second half in its upper bits."""
    size = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -size % GROUP)).unflatten(-1, (-1, GROUP))
    scales = scale_of(groups.abs().amax(-1, keepdim=True), 7)
    codes = (codes_of(groups, scales) + 8).flatten(-2)[..., :size].to(torch.uint8)
    return codes[..., : size // 2] | codes[..., size // 2 :] << 4, scales[..., 0].bfloat16()


def _of_four(codes: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.cat((codes & 15, codes >> 4), -1).float() - 8
    return numbers * scales.repeat_interleave(GROUP, -1)[..., : numbers.shape[-1]]
