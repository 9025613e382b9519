"""Projections of few rows, with what comes before and after them: decode reads every weight once.

Such a product is bound by the bytes of the weight, so each program streams a few rows of it in tiles that are several
loads ahead. `rows_linear` runs on the matrix units: up to 32 rows of x cost what one costs, and the gate, the bias and
the division by rms(x) need no launch of their own. Where a weight has few rows, its columns are split among programs
and `rms_norm` adds the parts up. `vector_linear`, for one row, runs on the plain cores: it can add its result to the
residual sum at once, because no split is needed to give every core a share.

Rounding follows `nanoinfer.layers`, but that a single row is divided by its rms after the product instead of before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.activation import ACTIVATIONS, activate
from nanoinfer.kernels.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.rms_norm import rounded
from nanoinfer.kernels.shape import next_power_of_2
from nanoinfer.kernels.tile_linear import MAX_ROWS, takes_tiles, tile_linear, tile_splits

FEW_ROWS = 32
"""More rows are for `tile_linear`, where it is, or for the library."""
SIZE_STEP = 64
"""The size of x must be a multiple of this."""
MAX_SPLITS = 8
VECTOR_BLOCK_K = 512
HELD_SIZE = 4096
"""Up to this size `vector_linear` reads the first tile of its weight while the kernel in front ends. In an H200's step of
one row the output projection, behind attention, gains 0.9 of 8 microseconds; the wider down projection, behind a kernel
that streams too, loses 0.3 of 14."""


@triton.jit(do_not_specialize=["num_tokens"])
def rows_linear_kernel(
    x,  # [num_tokens, SIZE]
    weight,  # [GATED ? 2 * num_rows : num_rows, SIZE], gate first
    bias,  # as many values as weight has rows, read with BIAS
    squares,  # [NUM_SQUARES] float32, whose sum is that of the squares that rms is taken of
    out,  # [num_tokens, num_rows], or [splits, num_tokens, num_rows] float32 where SPLIT_SIZE < SIZE
    num_tokens,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,  # columns of one program
    NUM_SQUARES: tl.constexpr,  # 0: do not divide
    SQUARES_TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_N divides num_rows
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    token = tl.arange(0, BLOCK_M)
    live = token < num_tokens
    column = tl.program_id(1) * SPLIT_SIZE + tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    # What the end needs is loaded first: behind the loop it would be waited for.
    if NUM_SQUARES > 0:
        lane = tl.arange(0, SQUARES_TILE)
        all_squares = tl.load(squares + lane, mask=lane < NUM_SQUARES, other=0.0)
    x_tile = x + token[None, :] * SIZE + column[:, None]
    first = weight + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    second = weight + (row + num_rows).to(tl.int64)[:, None] * SIZE + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, SPLIT_SIZE, BLOCK_K, num_stages=STAGES):
        value = tl.load(x_tile + start, mask=live[None, :], other=0.0)
        if EVEN:
            acc = tl.dot(tl.load(first + start), value, acc, input_precision=PRECISION)
            if GATED:
                up = tl.dot(tl.load(second + start), value, up, input_precision=PRECISION)
        else:
            tile = tl.load(first + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(tile, value, acc, input_precision=PRECISION)
            if GATED:
                tile = tl.load(second + start, mask=inside[:, None], other=0.0)
                up = tl.dot(tile, value, up, input_precision=PRECISION)
    let_next_in(PDL)
    target = (tl.program_id(1) * num_tokens + token[:, None]) * num_rows + row[None, :]
    stored = live[:, None] & inside[None, :]
    scale = 1.0
    if NUM_SQUARES > 0:
        scale = tl.rsqrt(tl.sum(all_squares) / SIZE + eps)
    result = tl.trans(acc) * scale
    if SPLIT_SIZE == SIZE:
        if BIAS:
            result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = rounded(result, out)
        if GATED:
            gate = result
            result = tl.trans(up) * scale
            if BIAS:
                result += tl.load(bias + num_rows + row, mask=inside, other=0.0).to(tl.float32)[None, :]
            result = rounded(activate(gate, GELU), out) * rounded(result, out)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stored)


def rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    num_splits: int = 1,
) -> Tensor:
    """activation(gate) * up, where (gate, up) = weight @ x / rms + bias; each part only where it is given.

    x: [N, size], packed rows, 1 to `FEW_ROWS` or as many as `takes_rows` says; weight: [num_rows, size], with an
    activation [2 * num_rows, size], gate first; bias: a value per row of weight; squares: [n] float32, for few rows, rms
    = sqrt(sum(squares) / size + eps); activation: one of `ACTIVATIONS`; num_splits: as `column_splits` gives it, or for few
    rows another divisor of size / 64. Returns [N, num_rows], or with more than one split their sums apart, [num_splits, N,
    num_rows] float32: then neither bias nor activation is allowed.
    """
    num_tokens, size = x.shape
    assert 0 < num_tokens <= MAX_ROWS and size == weight.shape[1] and size % (num_splits * SIZE_STEP) == 0
    assert x.is_contiguous() and weight.is_contiguous(), "rows must be packed"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "tensors must be aligned"
    assert num_splits == 1 or bias is activation is squares is None, "the parts of a sum cannot be finished"
    assert activation is None or activation in ACTIVATIONS, f"no kernel for {activation!r}"
    if num_tokens > FEW_ROWS:
        assert squares is None, "more than few rows have their norm"
        return tile_linear(x, weight, bias, activation=activation, num_splits=num_splits)
    gated = activation is not None
    num_rows = weight.shape[0] // (2 if gated else 1)
    out_shape = (num_tokens, num_rows) if num_splits == 1 else (num_splits, num_tokens, num_rows)
    out = torch.empty(out_shape, dtype=x.dtype if num_splits == 1 else torch.float32, device=x.device)
    block_m = 16 if num_tokens <= 16 else 32
    block_n, block_k, num_warps, stages = _row_tiles(size // num_splits, block_m, gated, num_splits > 1)
    num_squares = 0 if squares is None else squares.numel()
    rows_linear_kernel[(triton.cdiv(num_rows, block_n), num_splits)](
        x, weight, x if bias is None else bias, x if squares is None else squares, out, num_tokens, num_rows, eps,
        SIZE=size, SPLIT_SIZE=size // num_splits, NUM_SQUARES=num_squares,
        SQUARES_TILE=next_power_of_2(max(1, num_squares)), BIAS=bias is not None, GATED=gated,
        GELU=activation not in (None, "silu"), EVEN=num_rows % block_n == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=num_warps,
        **launch_options(x),
    )  # fmt: skip
    return out


def _row_tiles(split_size: int, block_m: int, gated: bool, is_split: bool) -> tuple[int, int, int, int]:
    """(BLOCK_N, BLOCK_K, warps, stages) from `make gpu-bench`'s shapes: enough bytes ahead, a share for every core."""
    wide = 128 if split_size % 128 == 0 else 64
    if is_split:
        return (32, wide, 2, 4) if block_m == 16 else (64, 64, 4, 3)
    if gated:
        return (32, wide, 2, 3) if block_m == 16 else (32, 64, 2, 4)
    return (16, 64, 1, 8) if block_m == 16 else (16, wide, 2, 4)


def takes_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `rows_linear` takes x: [N, size] on CUDA, and wins over the library."""
    if x.element_size() != 2 or x.shape[1] % SIZE_STEP:  # float32 has no matrix units
        return False
    return len(x) <= FEW_ROWS or takes_tiles(len(x), weight)


def column_splits(size: int, num_rows: int, num_tokens: int) -> int:
    """Splits of the columns of a weight with few rows: more parts make more programs, and more to add up."""
    if num_tokens > FEW_ROWS:
        return tile_splits(size, num_rows, num_tokens)
    steps, most = size // SIZE_STEP, MAX_SPLITS // 2 if num_tokens <= 16 else MAX_SPLITS
    return next(splits for splits in range(most, 0, -1) if steps % splits == 0)


@triton.jit
def vector_linear_kernel(
    x,  # [SIZE]
    weight,  # [num_rows, SIZE]
    total,  # [num_rows], added to
    norm_weight,  # [num_rows], read with SCALED
    scaled,  # [num_rows], written with SCALED
    squares,  # [programs] float32, written with SCALED
    num_rows,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    OFFSET: tl.constexpr,  # the norm's weight counts from 1
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HELD: tl.constexpr,  # the weight's first tile is read while the kernel in front ends
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    column = tl.arange(0, BLOCK_K)
    first = weight + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    if HELD:
        held = tl.load(first, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)
    # What the end needs is loaded first: behind the loop it would be waited for.
    if SCALED:
        factor = tl.load(norm_weight + row, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    before = tl.load(total + row, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if HELD:
        value = tl.load(x + column, mask=column < SIZE, other=0.0).to(tl.float32)
        acc += held.to(tl.float32) * value[None, :]
    for start in tl.range(BLOCK_K if HELD else 0, SIZE, BLOCK_K, num_stages=STAGES):
        in_size = start + column < SIZE
        value = tl.load(x + start + column, mask=in_size, other=0.0).to(tl.float32)
        tile = tl.load(first + start, mask=inside[:, None] & in_size[None, :], other=0.0)
        acc += tile.to(tl.float32) * value[None, :]
    let_next_in(PDL)
    result = rounded(rounded(tl.sum(acc, 1), total) + before, total)
    tl.store(total + row, result.to(total.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(squares + tl.program_id(0), tl.sum(result * result))
        if OFFSET:
            factor += 1.0
        tl.store(scaled + row, (result * factor).to(scaled.dtype.element_ty), mask=inside)


def vector_linear(
    x: Tensor, weight: Tensor, total: Tensor, norm: tuple[Tensor, bool] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Adds weight @ x to total, in place, for one row; and gives two thirds of its norm.

    x: [1, size]; weight: [num_rows, size]; total: [1, num_rows]; norm: weight [num_rows], and whether it counts from 1.
    Returns, with a norm, total times the norm's weight [1, num_rows], and squares [n] float32, which add up to the sum of
    total^2.
    """
    num_rows, size = weight.shape
    assert x.shape == (1, size) and total.shape == (1, num_rows), "one row"
    assert x.is_contiguous() and total.stride(1) == 1 and weight.is_contiguous(), "rows must be packed"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "tensors must be aligned"
    block_n, num_warps = (8, 4) if num_rows >= 2048 else (4, 2)  # few rows: smaller programs, a share for every core
    programs = triton.cdiv(num_rows, block_n)
    scaled = squares = None
    if norm is not None:
        scaled = torch.empty(1, num_rows, dtype=x.dtype, device=x.device)
        squares = torch.empty(programs, dtype=torch.float32, device=x.device)
    vector_linear_kernel[(programs,)](
        x, weight, total, x if norm is None else norm[0], total if scaled is None else scaled,
        total if squares is None else squares, num_rows,
        SIZE=size, SCALED=norm is not None, OFFSET=norm is not None and norm[1],
        BLOCK_N=block_n, BLOCK_K=VECTOR_BLOCK_K, STAGES=max(2, 8 // x.element_size()), num_warps=num_warps,
        HELD=size <= HELD_SIZE, **launch_options(x),
    )  # fmt: skip
    return None if norm is None else (scaled, squares)
