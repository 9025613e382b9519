"""Which layers share blocks: those of one kind, as many to a group as the pools have places for a block.

A block holds `block_size` tokens for the layers of one group. A part of it, one layer's, has the same bytes in every
group, so all groups take their blocks from one pool: layers whose tokens take more bytes have fewer in a block. A row
keeps all its blocks in a group without a window, and the newest alone in a group with one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offload.plan import KVPlace

UNBOUNDED = 2**40
"""Tokens of a row that any pool holds."""
MAX_EMPTY = 0.2
"""The share of the places of groups with a window that may have no layer: fewer groups, so fewer tables and copies."""


class KVKind(NamedTuple):
    """What layers have in common that share blocks.

    window: in tokens; None: full attention. block_size: tokens of a block; all kinds of one shape have the same. shape:
    number of the shape of a token's keys and values.
    """

    window: int | None
    block_size: int
    shape: int = 0


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values lie in the same blocks.

    Attributes:
        layers: counted among those that keep keys and values; the one at index p lies at place p of a block.
        window, block_size, shape: of all of them, as in `KVKind`.
    """

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    shape: int = 0

    def first_needed(self, position: int) -> int:
        """Return the first block with a key that a query at this position sees; later ones see no earlier block."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def first_needed_by(self, positions: np.ndarray) -> np.ndarray:
        """Return `first_needed` of each position."""
        return positions * 0 if self.window is None else np.maximum(positions - self.window + 1, 0) // self.block_size

    def num_filled(self, begin: int, ends: np.ndarray | int) -> np.ndarray:
        """Return for each end how many blocks become full from `begin` on that later tokens see."""
        first = np.maximum(self.first_needed_by(np.asarray(ends)), begin // self.block_size)
        return np.maximum(ends // self.block_size - first, 0)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a row of so many tokens."""
        return -(-num_tokens // self.block_size) - self.first_needed(num_tokens)

    def num_full(self, num_tokens: int) -> int:
        """Return how many of them are full."""
        return max(0, num_tokens // self.block_size - self.first_needed(num_tokens))

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a row holds until it has so many tokens, each computed alone."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks if self.window is None else min(num_blocks, self._in_window + 1)

    def most_full(self, num_tokens: int) -> int:
        """Return how many of them are full at most, or were needed a token before."""
        num_full = num_tokens // self.block_size
        return num_full if self.window is None else min(num_full, self._in_window + 1)

    def chunk_blocks(self, num_tokens: int, num_rows: int = 1) -> int:
        """Return the most blocks that so many tokens of so many rows take, beside the one that each may be in."""
        num_rows = min(num_rows, num_tokens)
        return (num_tokens - num_rows) // self.block_size + num_rows

    @cached_property
    def _in_window(self) -> int:
        return -(-self.window // self.block_size)


class KVGroups(tuple[KVGroup, ...]):
    """The groups of a model, those without a window first."""

    @classmethod
    def of(cls, kinds: Sequence[KVKind]) -> KVGroups:
        """Divide layers into groups, each kind in the layers' order.

        The number of places is chosen so that a token takes the fewest bytes in the groups without a window; then so
        that there are as few groups as possible, with few empty places (`MAX_EMPTY`).

        kinds: of each layer that keeps keys and values.
        """
        counts = Counter(kinds)
        windowed = [kind for kind in counts if kind.window is not None]
        num_windowed = sum(counts[kind] for kind in windowed)

        def cost(num_places: int) -> tuple[float, bool, int]:
            num_groups = {kind: -(-count // num_places) for kind, count in counts.items()}
            growing = sum(num_places * num / kind.block_size for kind, num in num_groups.items() if kind.window is None)
            places = num_places * sum(num_groups[kind] for kind in windowed)
            return growing, places - num_windowed > MAX_EMPTY * places, sum(num_groups.values())

        num_places = min(range(1, len(kinds) + 1), key=cost, default=1)
        groups = []
        for kind in sorted(counts, key=lambda one: (one.window is not None, one.window or 0, one.shape)):
            layers = [layer for layer, own in enumerate(kinds) if own == kind]
            parts = (layers[begin : begin + num_places] for begin in range(0, len(layers), num_places))
            groups += [KVGroup(tuple(part), *kind) for part in parts]
        return cls(groups)

    @property
    def block_size(self) -> int:
        """Tokens of the largest blocks."""
        return max(group.block_size for group in self)

    @property
    def num_places(self) -> int:
        """Places of a block."""
        return max((len(group.layers) for group in self), default=0)

    @property
    def places(self) -> tuple[KVPlace, ...]:
        """Where each layer that keeps keys and values has them."""
        pairs = {layer: KVPlace(i, place) for i, group in enumerate(self) for place, layer in enumerate(group.layers)}
        return tuple(pairs[layer] for layer in range(len(pairs)))

    @cached_property
    def _alike(self) -> tuple[tuple[KVGroup, int], ...]:
        """One of the groups of each window and block size, which hold as many blocks of any row, and their number."""
        found: dict[tuple[int | None, int], list[KVGroup]] = {}
        for group in self:
            found.setdefault((group.window, group.block_size), []).append(group)
        return tuple((groups[0], len(groups)) for groups in found.values())

    def table_width(self, num_tokens: int) -> int:
        """Return how many columns hold the blocks of a row in each group."""
        return max((-(-num_tokens // group.block_size) for group in self), default=0)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a row of so many tokens."""
        return sum(group.num_blocks(num_tokens) * count for group, count in self._alike)

    def num_full(self, num_tokens: int) -> int:
        """Return how many of them are full."""
        return sum(group.num_full(num_tokens) * count for group, count in self._alike)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a row holds until it has so many tokens, each computed alone."""
        return sum(group.most_blocks(num_tokens) * count for group, count in self._alike)

    def most_full(self, num_tokens: int) -> int:
        """Return how many of them are full and in their windows at most: what the host holds of the row."""
        return sum(group.most_full(num_tokens) * count for group, count in self._alike)

    def chunk_blocks(self, num_tokens: int) -> int:
        """Return the blocks of so many tokens that are computed together."""
        return sum(group.chunk_blocks(num_tokens) for group in self)

    def most_tokens(self, num_blocks: int, full_alone: bool = False) -> int:
        """Return the most tokens of a row that so many blocks hold; `UNBOUNDED` where windows bound what any row holds.

        full_alone: whether they need to hold full blocks alone.
        """
        count = self.most_full if full_alone else self.most_blocks
        sizes = [group.block_size for group in self if group.window is None]
        most = (num_blocks + 1) * min(sizes) if sizes else UNBOUNDED
        unit = math.gcd(*(group.block_size for group in self)) or 1  # a count is the same between its multiples
        units = bisect_right(range(most // unit + 1), num_blocks, key=lambda number: count(number * unit)) - 1
        return max(0, min(most, units * unit + (unit - 1) * full_alone))
