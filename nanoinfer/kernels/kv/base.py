"""How the keys and values of tokens become bytes of KV blocks, and are read again. Can be imported without triton."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton import JITFunction


class Field(NamedTuple):
    """So many numbers of a type, for each token and KV head."""

    width: int
    dtype: torch.dtype


class KVKernels(NamedTuple):
    """A format's device functions; docs/kv-formats.md says what they are given.

    store: writes a tile of keys and values; read: returns a tile of keys and values.
    stores_heads: whether `store` takes whole heads at once; else columns of heads, in any number of calls.
    turn: as `KVFormat.turn`, of whole heads; None: nothing is turned.
    """

    store: JITFunction
    read: JITFunction
    stores_heads: bool
    turn: JITFunction | None = None


@dataclass(frozen=True)
class KVFormat(ABC):
    """How a token's keys and values become bytes, and how tiles of bytes become keys and values.

    A token's bytes depend on that token alone. Released memory is filled with bytes of 255 by runtimes that look for
    wrong reads: these should read as NaN.

    Attributes:
        name: what messages call it.
        is_operand: whether the stored numbers are what products take, but for their type: the keys of all tokens of a
            block, then their values, each a head's. Then Hopper's copy unit can bring tiles of them.
        loads: tiles of the model's dtype that `read` loads for a tile of tokens, and shared memory holds. With more of
            them than keys and values, tiles have fewer tokens.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    is_operand = False
    loads = 2

    @abstractmethod
    def fields(self, head_dim: int) -> tuple[Field, ...]:
        """Return what is stored of each token and KV head. A part of a block is one field of all tokens after the
        other."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """k, v: [N, num_kv_heads, head_dim], as rounded by the layer. Return each field, [N, num_kv_heads, width]."""

    @abstractmethod
    def decode(self, fields: tuple[Tensor, ...], positions: Tensor, own: tuple) -> tuple[Tensor, Tensor]:
        """Return keys and values, [n, T, num_kv_heads, head_dim] of any type, of fields, [n, T, num_kv_heads, width].

        positions: [n, T] int64, of the tokens in their sequences; own: the layer's, as `own` returns them.
        """

    @abstractmethod
    def kernels(self) -> KVKernels:
        """Return the device functions; imports triton."""

    def of_one_vector(self, dtype: torch.dtype) -> KVFormat:
        """Return how heads of a model's dtype whose keys and values are one vector lie: by default as two."""
        return self

    def turn(self, heads: Tensor) -> Tensor:
        """Return queries, or keys for `encode`, [N, heads, head_dim], as they are multiplied: turned alike, or as they
        are."""
        return heads

    def own(self, rope: Tensor | None, k_norm: Tensor | None) -> tuple[Tensor, ...]:
        """Return what `decode` and the read function need of a layer besides its blocks.

        rope: the layer's position table, [max_position, 2 * pairs], cosines and sines; None: its heads are not turned;
        k_norm: weight of its norm of keys; None: it has none.
        """
        return ()

    def lacks(self, lacks_float8: str | None) -> str | None:
        """Return what a device lacks for this format; None: nothing. lacks_float8: as `Device.lacks_float8`."""
        return None


@dataclass(frozen=True)
class KVPart:
    """One layer's part of a KV block: the format's fields one after the other, each [block_size, heads, width]."""

    format: KVFormat
    block_size: int
    num_kv_heads: int
    head_dim: int

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each field."""
        fields = self.format.fields(self.head_dim)
        return [self.block_size * self.num_kv_heads * field.width * field.dtype.itemsize for field in fields]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def unit_bytes(self) -> int:
        """What the distance of two parts must be a multiple of: where the copy unit may bring tiles, a token's keys."""
        return self.sizes[0] // self.block_size if self.format.is_operand else 1

    def view(self, memory: Tensor) -> Tensor:
        """View blocks as kernels and backends take them. memory: [..., at least `num_bytes`] uint8.

        Returns:
            Of a format whose numbers are operands `[..., 2, block_size, num_kv_heads, head_dim]`, keys and values; of
            others the bytes, `[..., num_bytes]`.
        """
        memory = memory[..., : self.num_bytes]
        if not self.format.is_operand:
            return memory
        shape = (2, self.block_size, self.num_kv_heads, self.head_dim)
        return memory.view(self.format.fields(self.head_dim)[0].dtype).unflatten(-1, shape)

    def fields(self, kv: Tensor) -> list[Tensor]:
        """Return views of each field, [num_blocks, block_size, num_kv_heads, width]. kv: as `view` returns it."""
        if self.format.is_operand:
            return [*kv.unbind(1)]
        shape = (self.block_size, self.num_kv_heads, -1)
        fields = zip(kv.split(self.sizes, -1), self.format.fields(self.head_dim), strict=True)
        return [part.view(field.dtype).unflatten(-1, shape) for part, field in fields]

    def store(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write k and v, [N, num_kv_heads, head_dim] each, to their slots of kv; a negative slot is skipped."""
        kept = (slots >= 0).nonzero()[:, 0]
        slots = slots[kept].long()
        places = slots // self.block_size, slots % self.block_size
        for field, values in zip(self.fields(kv), self.format.encode(k[kept], v[kept]), strict=True):
            _indexable(field).index_put_(places, _indexable(values))

    def read(
        self, kv: Tensor, blocks: Tensor, numbers: Tensor, count: int, positions: Tensor, own: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, [n, count, num_kv_heads, head_dim], of `count` tokens of each of n blocks.

        kv: as `view` returns it; blocks: [n]; numbers: [n], which `count` tokens of its block, counted from 0.
        """
        found = []
        for field in self.fields(kv):
            cut = _indexable(field).unflatten(1, (self.block_size // count, count))
            found.append(cut[blocks, numbers].view(field.dtype))
        return self.format.decode(tuple(found), positions, own)


def _indexable(x: Tensor) -> Tensor:
    """torch takes no float8 by index on the CPU."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
