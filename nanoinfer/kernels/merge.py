"""Combine the partials of each row by their log-sum-exps (Flash-Decoding's reduction step).

Two steps, each in one order for every batch: the splits of a block are folded one after the other, where `decode_partial`
has not done it already; then the blocks are added up, as a tree over 128 of them (halves onto halves, so that a tree over
fewer is the same with zeros), and one such tree after the other. The kernel is compiled without fusing products and
sums, since what is fused would depend on how a program's tile lies in its threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.online_softmax import finite, fold
from nanoinfer.kernels.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.shape import next_power_of_2

LANES = 32
"""Blocks that a program adds up at a time, a quarter of a tree."""
MANY_PROGRAMS = 512
LANES_OF_MANY_SHORT_ROWS = 8
COLUMNS_OF_FEW = 32


@triton.jit
def read_partials(
    lse_row, out_row, numbers, count, heads, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """partials [LANES, HEADS, COLUMNS] and lse [LANES, HEADS]: 0 and -inf from `count` on."""
    at = numbers[:, None] * NUM_Q_HEADS + heads[None, :]
    listed = (numbers < count)[:, None]
    lse = tl.load(lse_row + at, mask=listed, other=float("-inf"))
    parts = tl.load(
        out_row + at[:, :, None] * HEAD_DIM + columns[None, None, :],
        mask=listed[:, :, None] & (columns < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    return parts, lse


@triton.jit
def read_block(
    lse_row, out_row, blocks, per_block, count, heads, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """The same of whole blocks, of which each has 1, 2 or 4 partials."""
    first = blocks * per_block
    parts, lse = read_partials(lse_row, out_row, first, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    for number in range(1, per_block):
        # The numbers of one block's partials end with it, so none of another block is taken for one of it.
        other, other_lse = read_partials(lse_row, out_row, first + number, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        parts, lse = fold(parts, lse, other, other_lse)
    return parts, lse


@triton.jit
def add_halves(x):
    """[LANES, HEADS, COLUMNS] -> [HEADS, COLUMNS]: the second half of the lanes onto the first, until one is left."""
    for _ in tl.static_range(8):
        if x.shape[0] > 2:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2])), 0)
    return tl.sum(x, 0)


@triton.jit
def add_blocks(parts, lse, peak):
    """Sum and weight of up to LANES blocks, relative to the peak: [HEADS, COLUMNS], [HEADS, 1]."""
    weights = tl.exp2((lse - peak[None, :]) * 1.4426950408889634)
    return add_halves(weights[:, :, None] * parts), add_halves(weights[:, :, None])


@triton.jit(
    do_not_specialize_on_alignment=["partial_lse", "ranges", "partials_per_block"],
)
def merge_kernel(
    partial_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    partial_lse,  # [capacity, NUM_Q_HEADS] float32, natural log
    ranges,  # [B + 1] int32
    partials_per_block,  # [B] int32
    out,  # [B, NUM_Q_HEADS, HEAD_DIM]
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # of one program
    LANES: tl.constexpr,
    SHORT: tl.constexpr,  # lanes for a row of few blocks
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = tl.load(ranges + row)
    count = tl.load(ranges + row + 1) - first
    per_block = tl.load(partials_per_block + row)
    lse_row = partial_lse + first.to(tl.int64) * NUM_Q_HEADS
    wait_for_inputs(PDL)
    let_next_in(PDL)
    out_row = partial_out + first.to(tl.int64) * (NUM_Q_HEADS * HEAD_DIM)

    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    total = tl.zeros([HEADS, 1], tl.float32)
    lanes = tl.arange(0, LANES)
    if count <= SHORT * per_block:
        short = tl.arange(0, SHORT)
        parts, lse = read_block(lse_row, out_row, short, per_block, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        acc, total = add_blocks(parts, lse, finite(tl.max(lse, 0)))
    elif count <= LANES * per_block:
        parts, lse = read_block(lse_row, out_row, lanes, per_block, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        acc, total = add_blocks(parts, lse, finite(tl.max(lse, 0)))
    else:
        # So many blocks are never cut.
        peaks = tl.full([4 * LANES, HEADS], float("-inf"), tl.float32)
        many = tl.arange(0, 4 * LANES)
        for start in range(0, count, 4 * LANES):
            at = (start + many)[:, None] * NUM_Q_HEADS + heads[None, :]
            peaks = tl.maximum(peaks, tl.load(lse_row + at, mask=(start + many < count)[:, None], other=float("-inf")))
        peak = finite(tl.max(peaks, 0))
        for start in range(0, count, 4 * LANES):
            at = start + lanes
            parts0, lse0 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            at += LANES
            parts1, lse1 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            at += LANES
            parts2, lse2 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            at += LANES
            parts3, lse3 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            weight0 = tl.exp2((lse0 - peak[None, :]) * 1.4426950408889634)[:, :, None]
            weight1 = tl.exp2((lse1 - peak[None, :]) * 1.4426950408889634)[:, :, None]
            weight2 = tl.exp2((lse2 - peak[None, :]) * 1.4426950408889634)[:, :, None]
            weight3 = tl.exp2((lse3 - peak[None, :]) * 1.4426950408889634)[:, :, None]
            # The first two steps of a tree over 128.
            acc += add_halves((weight0 * parts0 + weight2 * parts2) + (weight1 * parts1 + weight3 * parts3))
            total += add_halves((weight0 + weight2) + (weight1 + weight3))
    mixed = acc / tl.where(total == 0.0, 1.0, total)
    target = out + (row.to(tl.int64) * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=in_head[None, :])


def merge(partial_out: Tensor, partial_lse: Tensor, ranges: Tensor, partials_per_block: Tensor, out: Tensor) -> None:
    """out[b] = softmax-weighted mean of the partials ranges[b]:ranges[b + 1]; zeros where there is none.

    partial_out: [capacity, num_q_heads, head_dim] float32; partial_lse: [capacity, num_q_heads] float32, natural log;
    ranges: [B + 1] int32; partials_per_block: [B] int32, 1, 2 or 4, of each block of a row but its last; out: [B,
    num_q_heads, head_dim], contiguous.
    """
    batch_size, num_q_heads, head_dim = out.shape
    if batch_size == 0:
        return
    block_d = next_power_of_2(head_dim)
    is_many = batch_size * num_q_heads > MANY_PROGRAMS
    # Few programs wait for memory: they share the columns of a head. Many keep the cores busy, and mostly have few blocks.
    columns = block_d if is_many else min(block_d, COLUMNS_OF_FEW)
    merge_kernel[(batch_size, num_q_heads, block_d // columns)](
        partial_out, partial_lse, ranges, partials_per_block, out, NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim,
        HEADS=1, COLUMNS=columns, LANES=LANES, SHORT=LANES_OF_MANY_SHORT_ROWS if is_many else LANES,
        num_warps=max(1, block_d // 64) if is_many else 4, enable_fp_fusion=False,
        **launch_options(out),
    )  # fmt: skip
