"""Pairs of a row and an expert that it goes through, as the tiles of a product take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nanoinfer.kernels.experts.choose import sort_pairs
from nanoinfer.kernels.experts.routing import ExpertWeights
from nanoinfer.kernels.experts.tiles import tiles_of
from nanoinfer.kernels.linear.launches import Tiles


class Pairs(NamedTuple):
    """Pairs of row and expert. ids: [N, num_chosen], None: each row has expert 0 alone; table: each expert's index;
    order, tiles: of `sort_pairs`; count: of pairs."""

    ids: Tensor | None
    table: Tensor
    order: Tensor | None
    tiles: Tensor | None
    sizes: Tiles
    count: int


def pairs_of(
    x: Tensor, ids: Tensor | None, table: Tensor, experts: ExpertWeights, experts_read: Tensor | None = None
) -> Pairs:
    """Return the pairs, sorted into tiles. Those of one row of x need not be: they have different experts.

    ids: as in `Pairs`.
    """
    is_packed = any(weight.packed is not None for weight in (*experts.gate_up, experts.down))
    count = len(x) if ids is None else ids.numel()
    sizes = tiles_of(x, 0 if len(x) == 1 else count, len(table), is_packed)
    if ids is None or len(ids) == 1:
        return Pairs(ids, table, None, None, sizes, count)
    return Pairs(ids, table, *sort_pairs(ids, table, sizes.block_m, experts_read), sizes, count)
