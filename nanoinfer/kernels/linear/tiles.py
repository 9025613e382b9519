"""Matrix products of more than a few rows, tiled over the rows of x and of the weight, with bias, activation and gate.

For this many rows the library splits K by the number of rows, starts only when the previous kernel has ended, leaves
cores without work, and needs another launch for the gate. These kernels always sum K in ascending order, are cut into
about one program per core, and start early (see `pdl`). On Hopper the copy unit loads the tiles.

Rounding follows `nanoinfer.layers`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import activate
from nanoinfer.kernels.layer.rms_norm import rounded

PROGRAMS = 132
"""About this many programs run at a time if one fills a core's shared memory."""


@triton.jit
def biased(result, bias, inside):
    """Add a bias to each column of result [M, N]; bias: pointers [N].

    The sum is an fma with a factor of one. The compiler would turn a plain sum with the result of a single `tl.dot`
    into the start value of the accumulator, which rounds in another order.
    """
    value = tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return tl.fma(result, tl.full(result.shape, 1.0, tl.float32), tl.broadcast_to(value[None, :], result.shape))


@triton.jit
def finished_product(
    acc, up, bias, row, inside, num_rows, out, BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    """Apply bias, activation and gate to the sums acc [M, N], each rounded; up: the sums of the half that is gated."""
    if BIAS:
        acc = biased(acc, bias + row, inside)
    if GATED:
        if BIAS:
            up = biased(up, bias + num_rows + row, inside)
        acc = rounded(activate(rounded(acc, out), GELU), out) * rounded(up, out)
    return acc


@triton.jit
def load_tile(
    rows, x, first_row, column, num_rows, end,
    SIZE: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK_R, BLOCK_K] of x [num_rows, SIZE] from (first_row, column) on.

    Values are 0 beyond the rows of x and from column `end` on.
    """
    if TMA:
        return rows.load([first_row, column])
    row = first_row + tl.arange(0, BLOCK_R)
    at = column + tl.arange(0, BLOCK_K)
    listed = (row < num_rows)[:, None]
    if not EVEN:
        listed &= (at < end)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * SIZE + at[None, :], mask=listed, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def tile_linear_kernel(
    x,  # [num_tokens, SIZE]
    weight,  # [GATED ? 2 * num_rows : num_rows, SIZE], gate first
    x_rows,  # x as a descriptor of boxes of BLOCK_M x BLOCK_K, with TMA
    weight_rows,  # weight as a descriptor of boxes of BLOCK_N x BLOCK_K, with TMA
    bias,  # one value per row of weight, read with BIAS
    out,  # [num_tokens, num_rows], or [parts, num_tokens, num_rows] float32 where PART_SIZE < SIZE
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr,  # columns of one program
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that share rows of the weight follow each other, so only one of them reads these rows from memory.
    first_token = tl.program_id(0) * BLOCK_M
    first_row = tl.program_id(1) * BLOCK_N
    all_rows = 2 * num_rows if GATED else num_rows
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = tl.program_id(2) * PART_SIZE
    end = begin + PART_SIZE
    EVEN: tl.constexpr = PART_SIZE % BLOCK_K == 0
    for column in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        value = load_tile(x_rows, x, first_token, column, num_tokens, end, SIZE, EVEN, BLOCK_M, BLOCK_K, TMA)
        tile = load_tile(weight_rows, weight, first_row, column, all_rows, end, SIZE, EVEN, BLOCK_N, BLOCK_K, TMA)
        acc = tl.dot(value, tile.T, acc, input_precision=PRECISION)
        if GATED:
            second = num_rows + first_row
            tile = load_tile(weight_rows, weight, second, column, all_rows, end, SIZE, EVEN, BLOCK_N, BLOCK_K, TMA)
            up = tl.dot(value, tile.T, up, input_precision=PRECISION)
    let_next_in(PDL)
    token = first_token + tl.arange(0, BLOCK_M)
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    result = acc
    if PART_SIZE == SIZE:
        result = finished_product(acc, up, bias, row, inside, num_rows, out, BIAS, GATED, GELU)
    target = (tl.program_id(2) * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
    stored = (token < num_tokens)[:, None] & inside[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stored)


def tile_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, out: Tensor, num_parts: int = 1
) -> Tensor:
    """Compute `rows.linear` or `rows.linear_parts` for any number of rows; out: shape and dtype of their result."""
    num_tokens, size = x.shape
    gated = activation is not None
    num_rows = weight.shape[0] // (2 if gated else 1)
    tma = takes_descriptors(x.device, size, x.element_size())
    block_m, block_n, block_k, num_warps, stages = tiles(num_tokens, num_rows, num_parts, gated, tma)
    x_rows = weight_rows = None
    if tma:
        x_rows = TensorDescriptor(x, [num_tokens, size], [size, 1], [block_m, block_k])
        weight_rows = TensorDescriptor(weight, list(weight.shape), [size, 1], [block_n, block_k])
    grid = (triton.cdiv(num_tokens, block_m), triton.cdiv(num_rows, block_n), num_parts)
    tile_linear_kernel[grid](
        x, weight, x_rows, weight_rows, x if bias is None else bias, out, num_tokens, num_rows,
        SIZE=size, PART_SIZE=size // num_parts, BIAS=bias is not None, GATED=gated,
        GELU=activation not in (None, "silu"), PRECISION="ieee" if x.dtype == torch.float32 else "tf32", TMA=tma,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=num_warps, **launch_options(x),
    )  # fmt: skip
    return out


def takes_descriptors(device: torch.device, size: int, itemsize: int) -> bool:
    """Whether the copy unit (the tensor memory accelerator) loads tiles. Rows must begin at multiples of 16 bytes.

    Of the GPUs with a copy unit only those with 227 KiB of shared memory use it: its larger tiles need as much.
    """
    return device.type == "cuda" and _capability(device)[0] in (9, 10) and size * itemsize % 16 == 0


def tiles(num_tokens: int, num_rows: int, num_parts: int, gated: bool, tma: bool) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), tuned on an H200: the largest tiles that occupy every core.

    Without the copy unit the tiles fit 99 KiB of shared memory, which is what the smallest GPUs have.
    """

    def fit(block_m: int, block_n: int) -> bool:
        return triton.cdiv(num_tokens, block_m) * triton.cdiv(num_rows, block_n) * num_parts <= PROGRAMS

    if not tma:
        return (64, 64, 32, 4, 4) if gated else (64, 64, 64, 4, 3)
    if gated:
        if fit(64, 32):
            return 64, 32, 128, 4, 4
        if fit(64, 64):
            return 64, 64, 128, 4, 4
        return (64, 32, 64, 4, 4) if num_tokens <= 128 else (64, 128, 64, 4, 4)
    if num_tokens <= 32 and num_parts > 1:
        return 32, 64, 128, 4, 6
    if fit(64, 32) and num_tokens > 32:
        return 64, 32, 128, 4, 6
    if fit(64, 64):
        return 64, 64, 128, 4, 6
    if fit(64, 128) or num_tokens <= 64:
        return 64, 128, 128, 4, 4
    if fit(128, 128):
        return 128, 128, 64, 4, 4
    # Many programs, such as those of the head. Of three stages two programs fit on a core.
    if num_tokens <= 128:
        return 128, 128, 64, 4, 3
    return (128, 256, 64, 8, 4) if num_tokens <= 256 else (256, 128, 64, 8, 4)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
