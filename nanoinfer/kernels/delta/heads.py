"""The heads of a Gated DeltaNet layer."""

from __future__ import annotations

from typing import NamedTuple

from nanoinfer.kernels.layer.state_runs import CHUNK
from nanoinfer.kernels.linear.shard import Shard

PIECE = 32
"""Chunks of prompts that are computed at a time, which bounds their workspace."""


class DeltaHeads(NamedTuple):
    """How many heads there are, and which value heads share a key head: r = num_value_heads / num_key_heads of them.

    Attributes:
        key_size, value_size: numbers of a key and of a value. A state has key_size x value_size for each value head.
        is_tiled: whether value head j belongs to key head j % num_key_heads, as in GGUF files; else to j // r.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    is_tiled: bool = False

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries of all key heads, keys of all of them, values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    def ranges_of(self, shard: Shard) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return which key heads a rank has, and which value heads."""
        values = self.num_value_heads // shard.size
        first, count = shard.rank * values, self.num_key_heads // shard.size
        keys = (0, self.num_key_heads) if self._repeats_keys else (shard.rank * count, (shard.rank + 1) * count)
        return keys, (first, first + values)

    def of_rank(self, shard: Shard) -> DeltaHeads:
        """Return what a rank has of these heads: all, where they cannot be shared evenly."""
        values, keys = self.num_value_heads // shard.size, self.num_key_heads
        divides = values % keys == 0 if self._repeats_keys else keys % shard.size == 0
        if self.num_value_heads % shard.size or not divides:
            return self
        keys = keys if self._repeats_keys else keys // shard.size
        return DeltaHeads(keys, values, self.key_size, self.value_size, self.is_tiled)

    @property
    def _repeats_keys(self) -> bool:
        """Whether each rank has all key heads: tiled value heads are cut in their order, and each part has some of
        every key head."""
        return self.is_tiled and self.num_value_heads > self.num_key_heads or self.num_key_heads == 1

    def key_head_of(self, value_head: int) -> int:
        """Return the key head that a value head belongs to."""
        if self.is_tiled:
            return value_head % self.num_key_heads
        return value_head // (self.num_value_heads // self.num_key_heads)


def gated_delta_bytes(num_tokens: int, heads: DeltaHeads) -> int:
    """Return what a layer takes beside its inputs and outputs for a step of prompts: every token may be one's last."""
    return min(PIECE, num_tokens) * heads.num_value_heads * (3 * CHUNK + 5) * CHUNK * 4
