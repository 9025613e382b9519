"""The shape of a model's attention, and how its decode steps are cut. Can be imported without triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.kv.base import KVFormat, KVPart
from nanoinfer.kernels.kv.one_vector import OneVector
from nanoinfer.kernels.kv.plain import Plain

SHORT_BLOCKS = 6
"""The tiles of a row's blocks may be separate items if the row reads at most this many blocks."""
EXPANDED_BYTES = 64 * 2**20
"""Of the keys and values that prefill makes of other formats at a time, if a block has no more. The running softmax is
stored and read once for so many: with 16,384 tokens of 8 heads of 128 numbers, that is a fiftieth of attending."""
MAX_TILES_APART = 128
"""Most separate tiles in a step. If there would be more, all rows are attended to block by block."""


class HeadShape(NamedTuple):
    """The heads of a layer as a config has them.

    has_one_projection: whether keys and values are made of one projection.
    """

    num_q_heads: int
    num_kv_heads: int | None
    head_dim: int
    has_one_projection: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What attention layers of one shape have in common: the one declaration, from the config to the kernels.

    Raises:
        ValueError: numbers that no backend can run.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    has_one_projection: bool = False
    """Whether keys and values are made of one projection."""
    scale: float
    """Factor on q.k, above 0 (usually head_dim ** -0.5)."""
    softcap: float | None
    """logits = softcap * tanh(logits / softcap), after the scale and before the mask; None: no cap."""
    dtype: torch.dtype
    sinks: bool = False
    """Whether each query head has a sink: one more logit in every softmax, of no key, whose share is dropped."""
    windows: tuple[int | None, ...] = (None,)
    """The distinct sliding windows of these layers, in tokens; None in it stands for full attention."""
    block_size: int = 256
    """Tokens in a KV block and so in a split; a multiple of 16."""
    whole_group: int = 0
    """Query heads of a KV head in the whole model, of which one of several devices has some; 0: all are here."""
    kv_format: KVFormat | None = None
    """How keys and values lie in KV blocks; None: as numbers of `dtype`, of one projection as one vector."""

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads is {self.num_q_heads} and num_kv_heads is {self.num_kv_heads}: "
                "the query heads must divide evenly among the KV heads"
            )
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size} tokens: give a positive multiple of 16, such as 256")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"attention scale is {self.scale}: give a finite number above 0")
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap is {self.softcap}: give a finite number above 0, or None for no cap")
        if not self.windows:
            raise ValueError("windows is empty: list each distinct window of the layers, None for full attention")
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"sliding window is {window} tokens: give at least 1, or None for full attention")

    @property
    def part(self) -> KVPart:
        """One layer's part of a KV block."""
        if self.keeps_one_vector:
            own = OneVector(self.dtype) if self.kv_format is None else self.kv_format.of_one_vector(self.dtype)
        else:
            own = self.kv_format or Plain(self.dtype)
        return KVPart(own, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def keeps_one_vector(self) -> bool:
        """Whether the model's own format, and int8, is one vector for keys and values."""
        return self.has_one_projection and self.head_dim & (self.head_dim - 1) == 0

    @property
    def is_expanded(self) -> bool:
        """Whether keys and values are stored as something else than numbers of `dtype`."""
        return self.part.format != Plain(self.dtype)

    @property
    def expanded_blocks(self) -> int:
        """How many blocks prefill makes numbers of `dtype` of at a time; 0 where they are stored as such."""
        return max(1, EXPANDED_BYTES // self.expanded_block_bytes) if self.is_expanded else 0

    @property
    def expanded_block_bytes(self) -> int:
        """Of a block's keys and values as numbers of `dtype`."""
        return 2 * self.block_size * self.kv_size * self.dtype.itemsize

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Values of all query heads of a token."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of all keys of a token."""
        return self.num_kv_heads * self.head_dim

    def heads_of(self, memory: Tensor, num_rows: int) -> Tensor:
        """View the beginning of memory, flat, as values of all query heads: [num_rows, num_q_heads, head_dim]."""
        return memory[: num_rows * self.q_size].view(num_rows, self.num_q_heads, self.head_dim)
