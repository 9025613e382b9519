"""Which tiles the products of experts take. No choice changes a bit of a result."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch import Tensor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.linear.launches import LARGE_SHARED_MEMORY


class Tiles(NamedTuple):
    """Rows of x and of the weight for a program, columns of a step if the weight is wide, and so on."""

    block_m: int
    block_n: int
    columns: int
    num_warps: int
    stages: int


def tiles_of(x: Tensor, num_pairs: int, num_experts: int, is_packed: bool) -> Tiles:
    """Return the tiles of a product, by how many rows an expert has on average. No choice changes a bit.

    num_pairs: 0 if each pair is a tile. They are tuned on an H200.
    """
    if x.element_size() == 4:
        return Tiles(16, 32, 32, 4, 1)
    found = next(tiles for most, tiles in _TILES[is_packed] if num_pairs <= most * num_experts)
    target = target_of(x.device)
    if found.block_n > 128 and target.program_memory < LARGE_SHARED_MEMORY:
        found = found._replace(block_n=64, num_warps=4)
    return found._replace(block_m=max(found.block_m, target.least_rows))


_FOR_MORE = ((32, Tiles(32, 64, 128, 4, 3)), (128, Tiles(64, 64, 64, 4, 3)))
_TILES = {
    False: (
        (0, Tiles(8, 32, 256, 2, 3)),
        (6, Tiles(8, 64, 256, 4, 3)),
        (12, Tiles(16, 32, 256, 2, 3)),
        *_FOR_MORE,
        (sys.maxsize, Tiles(128, 128, 64, 8, 3)),
    ),
    True: (
        (0, Tiles(8, 32, 256, 1, 4)),
        (6, Tiles(8, 64, 256, 2, 3)),
        (12, Tiles(16, 128, 256, 4, 3)),
        *_FOR_MORE,
        (sys.maxsize, Tiles(64, 256, 64, 8, 3)),
    ),
}
"""By whether weights are packed: up to how many rows of an expert they serve."""
