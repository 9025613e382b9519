"""The shape of a KV block: the unit that both pools hold and the link carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Geometry of the KV cache, shared by the GPU pool, the host pool and the ring.

    A block holds `block_size` consecutive tokens of one sequence. Its part for one layer is a contiguous
    `[2, block_size, num_kv_heads, head_dim]` (keys, then values): one copy of `layer_block_bytes` moves it, and
    neighbouring blocks of a layer lie next to each other, so a run of blocks moves in one copy as well.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block in one layer."""
        return (2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer: the least that crosses the link at a time."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_block_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of a pool: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`."""
        return (self.num_layers, num_blocks, *self.block_shape)


def runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join (destination, source) block pairs into runs `(destination, source, count)` that one copy can move.

    Every copy call costs CPU time and, below about 1 MiB, link time; the driver never joins neighbours by itself.
    """
    joined: list[tuple[int, int, int]] = []
    for destination, source in pairs:
        if joined:
            first_destination, first_source, count = joined[-1]
            if (destination, source) == (first_destination + count, first_source + count):
                joined[-1] = (first_destination, first_source, count + 1)
                continue
        joined.append((destination, source, 1))
    return joined
