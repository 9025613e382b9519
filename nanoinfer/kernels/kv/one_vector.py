"""Keys and values that are made of one projection, as one vector: half of the bytes.

In full layers of Gemma 4 a value is the projection divided by its rms, and a key is the same times the weight of
the norm of keys, turned at the token's position. The value alone is stored. The key is made of it while it is read:
times the weight in float32, rounded once, and turned as the layer would have turned it. In float32 these are the
layer's own keys; in 16 bits some differ in the last place, because the value was rounded before. All keys are made so,
those of a step's own tokens, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.kv.base import Field, KVFormat, KVKernels
from nanoinfer.kernels.kv.codes import of_eight, to_eight


@dataclass(frozen=True)
class OneVector(KVFormat):
    """A value of each head, a power of two of numbers; `own` is position table, weight of keys, and pairs that turn."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"one vector of {str(self.dtype).removeprefix('torch.')}"

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return (Field(head_dim, self.dtype),)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (v.to(self.dtype),)

    def decode(self, fields: tuple[Tensor, ...], positions: Tensor, own: tuple) -> tuple[Tensor, Tensor]:
        from nanoinfer.kernels.reference import apply_rope  # which imports formats

        (v,), (table, weight, _) = fields, own
        k = (v.float() * weight.float()).to(self.dtype)
        at = positions.flatten().clamp(max=len(table) - 1)  # a block ends behind the last token
        return apply_rope(k.flatten(0, 1), table, at, distance=v.shape[-1] // 2).view_as(v), v

    def kernels(self) -> KVKernels:
        from nanoinfer.kernels.kv import one_vector_kernels as own

        stores = {
            torch.bfloat16: own.store_bfloat16,
            torch.float16: own.store_float16,
            torch.float32: own.store_float32,
        }
        return KVKernels(stores[self.dtype], own.read_one, stores_heads=False)

    def own(self, rope: Tensor | None, k_norm: Tensor | None) -> tuple:
        return rope, k_norm, rope.shape[1] // 2


@dataclass(frozen=True)
class OneVectorInt8(OneVector):
    """The same as 8-bit codes with a scale for each token and head, which stands twice: for a load of four bytes."""

    @property
    def name(self) -> str:
        return "int8"

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return Field(head_dim, torch.int8), Field(2, torch.bfloat16)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        codes, scales = to_eight(v.float())
        return codes, scales.expand(*scales.shape[:-1], 2)

    def decode(self, fields: tuple[Tensor, ...], positions: Tensor, own: tuple) -> tuple[Tensor, Tensor]:
        codes, scales = fields
        return super().decode((of_eight(codes, scales[..., :1].float()).to(self.dtype),), positions, own)

    def kernels(self) -> KVKernels:
        from nanoinfer.kernels.kv import one_vector_kernels as own

        return KVKernels(own.store_int8, own.read_int8, stores_heads=True)
