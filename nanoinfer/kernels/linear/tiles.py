"""Matrix products of more than a few rows, tiled over the rows of x and of the weight, with bias, activation and gate.

For this many rows the library splits K by the number of rows, starts only when the previous kernel has ended, leaves
cores without work, and needs another launch for the gate. These kernels always sum K in ascending order, are cut into
about one program per core, and start early (see `pdl`). On Hopper the copy unit loads the tiles.

Rounding follows `nanoinfer.layers`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import activate
from nanoinfer.kernels.layer.rms_norm import rounded


@triton.jit
def plus(result, value):
    """Add a value to each column of result [M, N]; value: [N] float32.

    The sum is an fma with a factor of one. The compiler would turn a plain sum with the result of a single `tl.dot`
    into the start value of the accumulator, which rounds in another order.
    """
    return tl.fma(result, tl.full(result.shape, 1.0, tl.float32), tl.broadcast_to(value[None, :], result.shape))


@triton.jit
def biased(result, bias, inside):
    """Add a bias to each column of result [M, N]; bias: pointers [N]."""
    return plus(result, tl.load(bias, mask=inside, other=0.0).to(tl.float32))


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
def columns_of(part, SIZE: tl.constexpr, CUT: tl.constexpr):
    """Return the first column of a part of a sum, and the one behind its last. CUT: SIZE, if the sum is whole."""
    begin = part * CUT
    end = begin + CUT
    if SIZE != CUT and SIZE != 2 * CUT:
        end = tl.where(part == 0, CUT, SIZE)
    return begin, end


@triton.jit
def finished_part(result, bias, row, inside, part, BIAS: tl.constexpr):
    """Add the bias to part 0 of a sum, [M, N] float32."""
    if BIAS:
        value = tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        result = plus(result, tl.where(part == 0, value, 0.0))
    return result


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
    out,  # [num_tokens, num_rows], or [2, num_tokens, num_rows] float32 where CUT < SIZE
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    CUT: tl.constexpr,  # columns of part 0 of a sum; SIZE: it is whole
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
    begin, end = columns_of(tl.program_id(2), SIZE, CUT)
    EVEN: tl.constexpr = CUT % BLOCK_K == 0 and SIZE % BLOCK_K == 0
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
    if CUT == SIZE:
        result = finished_product(acc, up, bias, row, inside, num_rows, out, BIAS, GATED, GELU)
    else:
        result = finished_part(acc, bias, row, inside, tl.program_id(2), BIAS)
    target = (tl.program_id(2) * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
    stored = (token < num_tokens)[:, None] & inside[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stored)
