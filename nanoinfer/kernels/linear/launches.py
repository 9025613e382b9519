"""How products are launched: their tiles, from tables, and the arguments that all their kernels take.

Of a table the first row that serves a product is taken. They are tuned on an H200: for enough bytes in flight, and work
for every core. No choice changes a bit of a result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import triton
from torch import Tensor

from nanoinfer.devices.registry import target_of
from nanoinfer.devices.target import Target
from nanoinfer.kernels.launch.pdl import launch_options
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.linear.cuts import divided

PROGRAMS = 132
"""About this many programs run at a time if one fills a core's shared memory."""
LARGE_OUTPUT = 2**15
"""A weight of more rows than this gives enough programs even if each of them takes more rows."""
LARGE_SHARED_MEMORY = 160 * 1024
"""From so many bytes for a program on, tiles for many rows are loaded one more step ahead."""


class Product(NamedTuple):
    """A product of num_tokens rows of x that has num_rows columns, in num_parts parts of up to part_size columns."""

    num_tokens: int
    num_rows: int
    part_size: int
    num_parts: int
    target: Target
    least_step: int  # columns that a step must have at least


class Tiles(NamedTuple):
    """Tiles, and which products they serve: of up to so many rows of x, and only of some.

    block_m, block_n, columns: rows of x, rows of the weight, and columns of a step, of which `stages` are loaded at a
    time. Of few rows and of packed weights block_m is no larger than the rows of x need and matrix units take.
    """

    block_m: int
    block_n: int
    columns: int
    num_warps: int
    stages: int
    up_to: int = sys.maxsize
    only: Callable[[Tiles, Product], bool] = lambda tiles, of: True


def _fits(tiles: Tiles, of: Product) -> bool:
    blocks = triton.cdiv(of.num_tokens, tiles.block_m) * triton.cdiv(of.num_rows, tiles.block_n)
    return blocks * of.num_parts <= PROGRAMS


def _is_async(tiles: Tiles, of: Product) -> bool:
    return of.target.has_async_products


def _elsewhere(columns: int) -> tuple[Tiles, ...]:
    """Return what serves packed weights where matrix units do not run on by themselves: one size beyond 32 rows."""
    return (
        Tiles(32, 64, 256, 4, 3, up_to=32),
        Tiles(64, 64, columns, 4, 3, only=lambda _, of: of.target.program_memory >= LARGE_SHARED_MEMORY),
        Tiles(64, 64, columns, 4, 2),
    )


_TABLES = {
    ("few rows", False): (
        Tiles(32, 64, 128, 4, 3, only=lambda _, of: of.num_rows > LARGE_OUTPUT),
        # Programs that sum over still more columns keep more bytes in flight with narrower tiles.
        Tiles(32, 16, 256, 2, 4, only=lambda _, of: 4096 <= of.part_size < 4608),
        Tiles(32, 16, 128, 1, 6),
    ),
    ("few rows", True): (
        # Half of a layer's programs, as one of two GPUs has, are too few with wide tiles.
        Tiles(32, 16, 128, 1, 4, only=lambda _, of: of.num_rows <= 5120),
        Tiles(32, 32, 128, 2, 3),
    ),
    # Without the copy unit tiles fit 99 KiB of shared memory, which is what the smallest GPUs have.
    ("loaded", False): (Tiles(64, 64, 64, 4, 3),),
    ("loaded", True): (Tiles(64, 64, 32, 4, 4),),
    ("copied", False): (
        Tiles(32, 64, 128, 4, 6, up_to=32, only=lambda _, of: of.num_parts > 1),
        Tiles(64, 32, 128, 4, 6, only=lambda tiles, of: of.num_tokens > 32 and _fits(tiles, of)),
        Tiles(64, 64, 128, 4, 6, only=_fits),
        Tiles(64, 128, 128, 4, 4, only=_fits),
        Tiles(64, 128, 128, 4, 4, up_to=64),
        Tiles(128, 128, 64, 4, 4, only=_fits),
        # Many programs, such as those of the head. Of three stages two programs fit on a core.
        Tiles(128, 128, 64, 4, 3, up_to=128),
        Tiles(128, 256, 64, 8, 4, up_to=256),
        Tiles(256, 128, 64, 8, 4),
    ),
    ("copied", True): (
        Tiles(64, 32, 128, 4, 4, only=_fits),
        Tiles(64, 64, 128, 4, 4, only=_fits),
        Tiles(64, 32, 64, 4, 4, up_to=128),
        Tiles(64, 128, 64, 4, 4),
    ),
    ("4 bits", False): (
        Tiles(8, 32, 256, 2, 4, up_to=8),
        Tiles(16, 32, 256, 2, 3, up_to=16),
        Tiles(32, 64, 256, 4, 3, up_to=32, only=_is_async),
        Tiles(64, 64, 256, 4, 3, up_to=64, only=_is_async),
        Tiles(128, 64, 256, 4, 3, up_to=128, only=_is_async),
        Tiles(64, 64, 256, 4, 2, up_to=256, only=_is_async),
        Tiles(128, 64, 256, 4, 1, only=_is_async),
        *_elsewhere(256),
    ),
    ("4 bits", True): (
        Tiles(8, 64, 256, 4, 3, up_to=8, only=lambda _, of: of.num_rows >= 2**13),
        Tiles(8, 32, 256, 2, 3, up_to=8),
        Tiles(32, 64, 256, 4, 3, up_to=32, only=_is_async),
        Tiles(64, 64, 256, 4, 2, up_to=64, only=_is_async),
        Tiles(64, 64, 256, 4, 3, up_to=256, only=_is_async),
        Tiles(64, 128, 256, 4, 2, only=_is_async),
        *_elsewhere(256),
    ),
    ("8 bits", False): (
        Tiles(8, 16, 256, 1, 4, up_to=8),
        Tiles(16, 32, 256, 2, 3, up_to=16),
        Tiles(64, 64, 128, 4, 4, up_to=64, only=_is_async),
        Tiles(128, 64, 128, 4, 2, up_to=128, only=_is_async),
        Tiles(64, 64, 128, 4, 3, up_to=256, only=_is_async),
        Tiles(128, 64, 128, 4, 2, only=_is_async),
        *_elsewhere(128),
    ),
    ("8 bits", True): (
        Tiles(8, 32, 128, 2, 4, up_to=8, only=lambda _, of: of.least_step <= 128),
        Tiles(8, 32, 256, 2, 3, up_to=8),
        Tiles(32, 64, 128, 4, 4, up_to=32, only=_is_async),
        Tiles(64, 64, 128, 4, 3, up_to=64, only=_is_async),
        Tiles(128, 64, 128, 4, 2, up_to=128, only=_is_async),
        Tiles(128, 64, 128, 4, 3, only=_is_async),
        *_elsewhere(128),
    ),
}
"""By the kernel, or what it loads, and whether there is a gate."""


def part_sizes(size: int, cut: int | None) -> tuple[int, ...]:
    """Return the columns of each part of a sum. cut: see `cuts`; None: it is whole."""
    return (size,) if cut is None else divided(size, cut)


def tiles_of(table: str, x: Tensor, out: Tensor, gated: bool, cut: int | None, *, least_step: int = 1) -> Tiles:
    """Return the tiles of a product; see `Product`. out: [..., num_rows], its result."""
    sizes = part_sizes(x.shape[1], cut)
    return _chosen(
        table, gated, Product(len(x), out.shape[-1], max(sizes), len(sizes), target_of(x.device), least_step)
    )


@lru_cache(maxsize=1024)
def _chosen(table: str, gated: bool, of: Product) -> Tiles:
    tiles = next(tiles for tiles in _TABLES[table, gated] if of.num_tokens <= tiles.up_to and tiles.only(tiles, of))
    if table in ("loaded", "copied"):
        return tiles
    return tiles._replace(block_m=max(of.target.least_rows, min(tiles.block_m, next_power_of_2(of.num_tokens))))


def arguments(
    x: Tensor, bias: Tensor | None, activation: str | None, out: Tensor, cut: int | None, tiles: Tiles
) -> dict[str, object]:
    """Return what all products are launched with."""
    return dict(
        bias=x if bias is None else bias, out=out, num_tokens=len(x), num_rows=out.shape[-1],
        CUT=cut or x.shape[1], BIAS=bias is not None, GATED=activation is not None,
        GELU=activation not in (None, "silu"), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.stages,
        num_warps=tiles.num_warps, **launch_options(x),
    )  # fmt: skip
