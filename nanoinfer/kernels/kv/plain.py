"""Keys and values as numbers of one type: the model's, or one that it is rounded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.kv.base import Field, KVFormat, KVKernels, KVPart


@dataclass(frozen=True)
class Plain(KVFormat):
    """Keys, then values, each as so many numbers of a type. Released memory reads as NaN in every type."""

    dtype: torch.dtype
    is_operand = True

    @property
    def name(self) -> str:
        return "fp8" if self.dtype == torch.float8_e4m3fn else str(self.dtype).removeprefix("torch.")

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return Field(head_dim, self.dtype), Field(head_dim, self.dtype)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """float8 has no infinity: without the clamp, values above its largest would become NaN."""
        if self.dtype.itemsize == 1:
            largest = torch.finfo(self.dtype).max
            k, v = k.clamp(-largest, largest), v.clamp(-largest, largest)
        return k.to(self.dtype), v.to(self.dtype)

    def decode(self, fields: tuple[Tensor, ...], positions: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return fields

    def kernels(self) -> KVKernels:
        from nanoinfer.kernels.kv.plain_kernels import read_plain, store_plain

        return KVKernels(store_plain, read_plain, stores_heads=False)

    def lacks(self, lacks_float8: str | None) -> str | None:
        return lacks_float8 if self.dtype.itemsize == 1 else None


def part_of(kv: Tensor) -> KVPart:
    """Return how plain blocks lie. kv: as `KVPart.view` returns it of them."""
    return KVPart(Plain(kv.dtype), *kv.shape[2:])


def as_model() -> None:
    """kv_cache_dtype="auto": numbers of the model's dtype, of one projection as one vector."""


def bfloat16() -> KVFormat:
    """kv_cache_dtype="bfloat16": keys and values, whatever the model's dtype and projections are."""
    return Plain(torch.bfloat16)


def float16() -> KVFormat:
    """kv_cache_dtype="float16": as `bfloat16`."""
    return Plain(torch.float16)


def fp8() -> KVFormat:
    """kv_cache_dtype="fp8": e4m3 with the scale 1."""
    return Plain(torch.float8_e4m3fn)
