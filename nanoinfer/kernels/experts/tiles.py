"""Which tiles the products of experts take. No choice changes a bit of a result."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.linear.launches import LARGE_SHARED_MEMORY, Tiles


def tiles_of(x: Tensor, num_pairs: int, num_experts: int, is_packed: bool) -> Tiles:
    """Return the tiles of a product, by how many rows an expert has on average. No choice changes a bit.

    num_pairs: 0 if each pair is a tile. They are tuned on an H200.
    """
    if x.element_size() == 4:
        return Tiles(16, 32, 32, 4, 1)
    tiles = next(one for one in _TILES[is_packed] if num_pairs <= one.up_to * num_experts)
    target = target_of(x.device)
    if tiles.block_n > 128 and target.program_memory < LARGE_SHARED_MEMORY:
        tiles = tiles._replace(block_n=64, num_warps=4)
    return tiles._replace(block_m=max(tiles.block_m, target.least_rows))


_FOR_MORE = (Tiles(32, 64, 128, 4, 3, up_to=32), Tiles(64, 64, 64, 4, 3, up_to=128))
_TILES = {
    False: (
        Tiles(8, 32, 256, 2, 3, up_to=0),
        Tiles(8, 64, 256, 4, 3, up_to=6),
        Tiles(16, 32, 256, 2, 3, up_to=12),
        *_FOR_MORE,
        Tiles(128, 128, 64, 8, 3),
    ),
    True: (
        Tiles(8, 32, 256, 1, 4, up_to=0),
        Tiles(8, 64, 256, 2, 3, up_to=6),
        Tiles(16, 128, 256, 4, 3, up_to=12),
        *_FOR_MORE,
        Tiles(64, 256, 64, 8, 3),
    ),
}
"""By whether weights are packed; `up_to`: rows of an expert; `columns`: where the weight is wide."""
