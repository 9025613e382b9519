"""Combine the partials of each row's splits by their log-sum-exps (Flash-Decoding's reduction step)."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.online_softmax import finite
from nanoinfer.kernels.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.shape import next_power_of_2

LSE_TILE = 128
FEW_SPLITS = 32
MANY_PROGRAMS = 512
HEADS_OF_MANY = 4
SPLITS_OF_MANY = 8
COLUMNS_OF_FEW = 32


def merge_tiles(num_row_heads: int, num_q_heads: int) -> tuple[int, int]:
    """(heads of a program, splits that it adds at a time).

    Few programs wait for memory: they share the columns of a head and take up to 32 splits at once; of more, 128 at a time
    make 4 dependent steps of 512 splits (128k tokens). Many programs keep the cores busy, and mostly have few splits
    each: they take eight at a time, mostly all. The choice, and so the bits, depend on the number of rows,
    those of a decode step's padding included, and the row's own splits alone.
    """
    if num_row_heads <= MANY_PROGRAMS:
        return 1, LSE_TILE
    heads = next(
        heads for heads in range(HEADS_OF_MANY, 0, -1) if num_q_heads % heads == 0 and heads & (heads - 1) == 0
    )
    return heads, SPLITS_OF_MANY


@triton.jit
def read_splits(
    lse_row, out_row, splits, count, heads, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """lse [SPLITS, HEADS] and partials [SPLITS, HEADS, COLUMNS]: -inf and 0 from `count` on."""
    at = splits[:, None] * NUM_Q_HEADS + heads[None, :]
    listed = (splits < count)[:, None]
    lse = tl.load(lse_row + at, mask=listed, other=float("-inf"))
    parts = tl.load(
        out_row + at[:, :, None] * HEAD_DIM + columns[None, None, :],
        mask=listed[:, :, None] & (columns < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    return lse, parts


@triton.jit(do_not_specialize_on_alignment=["partial_lse", "ranges"])
def merge_kernel(
    partial_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    partial_lse,  # [capacity, NUM_Q_HEADS] float32, natural log
    ranges,  # [B + 1] int32
    out,  # [B, NUM_Q_HEADS, HEAD_DIM]
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # of one program
    SPLIT_TILE: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = tl.load(ranges + row)
    count = tl.load(ranges + row + 1) - first
    lse_row = partial_lse + first.to(tl.int64) * NUM_Q_HEADS
    wait_for_inputs(PDL)
    let_next_in(PDL)
    out_row = partial_out + first.to(tl.int64) * (NUM_Q_HEADS * HEAD_DIM)

    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    lanes = tl.arange(0, SPLIT_TILE)
    if SPLIT_TILE < FEW_SPLITS:
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        for start in range(0, count, SPLIT_TILE):
            lse, parts = read_splits(lse_row, out_row, start + lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            base = finite(new_peak)
            old = tl.exp2((peak - base) * 1.4426950408889634)
            weights = tl.exp2((lse - base[None, :]) * 1.4426950408889634)
            acc = acc * old[:, None] + tl.sum(weights[:, :, None] * parts, 0)
            total = total * old + tl.sum(weights, 0)
            peak = new_peak
    elif count <= FEW_SPLITS:
        # One read of all, for loads that wait for nothing but each other.
        lse, parts = read_splits(
            lse_row, out_row, tl.arange(0, FEW_SPLITS), count, heads, columns, NUM_Q_HEADS, HEAD_DIM
        )
        weights = tl.exp2((lse - finite(tl.max(lse, 0))[None, :]) * 1.4426950408889634)
        acc = tl.sum(weights[:, :, None] * parts, 0)
        total = tl.sum(weights, 0)
    else:
        peaks = tl.full([SPLIT_TILE, HEADS], float("-inf"), tl.float32)
        for start in range(0, count, SPLIT_TILE):
            at = (start + lanes)[:, None] * NUM_Q_HEADS + heads[None, :]
            peaks = tl.maximum(peaks, tl.load(lse_row + at, mask=(start + lanes < count)[:, None], other=float("-inf")))
        peak = finite(tl.max(peaks, 0))
        for start in range(0, count, SPLIT_TILE):
            lse, parts = read_splits(lse_row, out_row, start + lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            weights = tl.exp2((lse - peak[None, :]) * 1.4426950408889634)
            acc += tl.sum(weights[:, :, None] * parts, 0)
            total += tl.sum(weights, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (row.to(tl.int64) * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_head[None, :])


def merge(partial_out: Tensor, partial_lse: Tensor, ranges: Tensor, out: Tensor) -> None:
    """out[b] = softmax-weighted mean of the partials ranges[b]:ranges[b + 1]; zeros where there is none.

    partial_out: [capacity, num_q_heads, head_dim] float32; partial_lse: [capacity, num_q_heads] float32, natural log;
    ranges: [B + 1] int32; out: [B, num_q_heads, head_dim], contiguous.
    """
    batch_size, num_q_heads, head_dim = out.shape
    if batch_size == 0:
        return
    heads, split_tile = merge_tiles(batch_size * num_q_heads, num_q_heads)
    block_d = next_power_of_2(head_dim)
    is_many = split_tile == SPLITS_OF_MANY
    columns = block_d if is_many else min(block_d, COLUMNS_OF_FEW)
    merge_kernel[(batch_size, num_q_heads // heads, block_d // columns)](
        partial_out, partial_lse, ranges, out, NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim,
        HEADS=heads, COLUMNS=columns, SPLIT_TILE=split_tile, FEW_SPLITS=FEW_SPLITS,
        num_warps=max(1, block_d // 128) if is_many else 4,
        **launch_options(out),
    )  # fmt: skip
