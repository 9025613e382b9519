"""Combine the partials of each row by their log-sum-exps (Flash-Decoding's reduction step).

Two steps, each in one order for every batch: the tiles of a block are folded one after the other, where `decode_partial`
has not done it already; then eight lanes add up every eighth block each, and each other. The kernel is compiled without
fusing products and sums, since what is fused would depend on how a program's tile lies in its threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.online_softmax import finished, finite, fold
from nanoinfer.kernels.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.shape import next_power_of_2

LANES = 8
"""Lane l adds up the blocks l, l + 8, l + 16, ... in this order."""
MANY_PROGRAMS = 512
COLUMNS_OF_FEW = 32
HEADS_OF_MANY = 4
"""What a program takes, where there are few or many of them: see `merge`."""


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
def read_tiles(
    lse_row, out_row, weight_row, blocks, count, heads, columns,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same of blocks whose tiles lie apart: they are folded here."""
    first = blocks * TILES
    at = first[:, None] * NUM_Q_HEADS + heads[None, :]
    parts, peak = read_partials(lse_row, out_row, first, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    weight = tl.load(weight_row + at, mask=(first < count)[:, None], other=0.0)
    for number in tl.static_range(1, TILES):
        # The last block's tiles end with it: none of another block is taken for one of it.
        other, other_peak = read_partials(
            lse_row, out_row, first + number, count, heads, columns, NUM_Q_HEADS, HEAD_DIM
        )
        other_weight = tl.load(
            weight_row + at + number * NUM_Q_HEADS, mask=(first + number < count)[:, None], other=0.0
        )
        parts, peak, weight = fold(parts, peak, weight, other, other_peak, other_weight)
    return finished(parts, peak, weight)


@triton.jit
def read_four(
    lse_row, out_row, blocks, count, heads, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Four times as many blocks as there are lanes, in loads that wait for nothing but each other."""
    parts0, lse0 = read_partials(lse_row, out_row, blocks, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    blocks += blocks.shape[0]
    parts1, lse1 = read_partials(lse_row, out_row, blocks, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    blocks += blocks.shape[0]
    parts2, lse2 = read_partials(lse_row, out_row, blocks, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    blocks += blocks.shape[0]
    parts3, lse3 = read_partials(lse_row, out_row, blocks, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    return parts0, lse0, parts1, lse1, parts2, lse2, parts3, lse3


@triton.jit
def add_lanes(x):
    """[LANES, HEADS, COLUMNS] -> [HEADS, COLUMNS]: the second half of the lanes onto the first, until one is left."""
    for _ in tl.static_range(8):
        if x.shape[0] > 2:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2])), 0)
    return tl.sum(x, 0)


@triton.jit
def add_blocks(acc, total, parts, lse, peak):
    """One block more for each lane: acc [LANES, HEADS, COLUMNS], total [LANES, HEADS, 1]."""
    weights = tl.exp2((lse - peak[None, :]) * 1.4426950408889634)[:, :, None]
    return acc + weights * parts, total + weights


@triton.jit(
    do_not_specialize_on_alignment=["partial_lse", "partial_weight", "ranges", "partials_per_block"],
)
def merge_kernel(
    partial_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    partial_lse,  # [capacity, NUM_Q_HEADS] float32, natural log
    partial_weight,  # the same, of tiles apart
    ranges,  # [B + 1] int32
    partials_per_block,  # [B] int32
    out,  # [B, NUM_Q_HEADS, HEAD_DIM]
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # of one program
    TILES: tl.constexpr,  # of a block, where they lie apart
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,  # loads many blocks at once
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = tl.load(ranges + row)
    count = tl.load(ranges + row + 1) - first
    per_block = tl.load(partials_per_block + row)
    lse_row = partial_lse + first.to(tl.int64) * NUM_Q_HEADS
    weight_row = partial_weight + first.to(tl.int64) * NUM_Q_HEADS
    wait_for_inputs(PDL)
    let_next_in(PDL)
    out_row = partial_out + first.to(tl.int64) * (NUM_Q_HEADS * HEAD_DIM)

    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    acc = tl.zeros([LANES, HEADS, COLUMNS], tl.float32)
    total = tl.zeros([LANES, HEADS, 1], tl.float32)
    lanes = tl.arange(0, LANES)
    if per_block > 1:
        # No more blocks than lanes: longer rows are not cut.
        parts, lse = read_tiles(
            lse_row, out_row, weight_row, lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM, TILES
        )
        acc, total = add_blocks(acc, total, parts, lse, finite(tl.max(lse, 0)))
    elif count <= LANES:
        parts, lse = read_partials(lse_row, out_row, lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        acc, total = add_blocks(acc, total, parts, lse, finite(tl.max(lse, 0)))
    elif AHEAD and count <= 4 * LANES:
        parts0, lse0, parts1, lse1, parts2, lse2, parts3, lse3 = read_four(
            lse_row, out_row, lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM
        )
        peak = finite(tl.max(tl.maximum(tl.maximum(lse0, lse1), tl.maximum(lse2, lse3)), 0))
        acc, total = add_blocks(acc, total, parts0, lse0, peak)
        acc, total = add_blocks(acc, total, parts1, lse1, peak)
        acc, total = add_blocks(acc, total, parts2, lse2, peak)
        acc, total = add_blocks(acc, total, parts3, lse3, peak)
    else:
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        many = tl.arange(0, 16 * LANES)
        for start in range(0, count, 16 * LANES):
            at = (start + many)[:, None] * NUM_Q_HEADS + heads[None, :]
            lse = tl.load(lse_row + at, mask=(start + many < count)[:, None], other=float("-inf"))
            peak = tl.maximum(peak, tl.max(lse, 0))
        peak = finite(peak)
        if AHEAD:
            for start in range(0, count, 4 * LANES):
                parts0, lse0, parts1, lse1, parts2, lse2, parts3, lse3 = read_four(
                    lse_row, out_row, start + lanes, count, heads, columns, NUM_Q_HEADS, HEAD_DIM
                )
                acc, total = add_blocks(acc, total, parts0, lse0, peak)
                acc, total = add_blocks(acc, total, parts1, lse1, peak)
                acc, total = add_blocks(acc, total, parts2, lse2, peak)
                acc, total = add_blocks(acc, total, parts3, lse3, peak)
        else:
            for start in range(0, count, LANES):
                at = start + lanes
                parts, lse = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
                acc, total = add_blocks(acc, total, parts, lse, peak)
    weight = add_lanes(total)
    mixed = add_lanes(acc) / tl.where(weight == 0.0, 1.0, weight)
    target = out + (row.to(tl.int64) * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=in_head[None, :])


def merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    partial_weight: Tensor,
    ranges: Tensor,
    partials_per_block: Tensor,
    tiles_per_block: int,
    out: Tensor,
) -> None:
    """out[b] = softmax-weighted mean of the partials ranges[b]:ranges[b + 1]; zeros where there is none.

    partial_out, partial_lse, partial_weight: as `decode_partial` writes them, [capacity, num_q_heads, head_dim] and
    [capacity, num_q_heads]; ranges: [B + 1] int32; partials_per_block: [B] int32, 1, or for a row of at most
    `LANES` blocks tiles_per_block, of each block but its last; out: [B, num_q_heads, head_dim], contiguous.
    """
    batch_size, num_q_heads, head_dim = out.shape
    if batch_size == 0:
        return
    block_d = next_power_of_2(head_dim)
    # Few programs wait for memory: they share the columns of a head. Many would wait for their launch, and mostly have few
    # blocks: a program takes several heads, each for a warp.
    is_many = batch_size * num_q_heads > MANY_PROGRAMS
    heads = next(count for count in (HEADS_OF_MANY, 2, 1) if num_q_heads % count == 0) if is_many else 1
    columns = block_d if is_many else min(block_d, COLUMNS_OF_FEW)
    merge_kernel[(batch_size, num_q_heads // heads, block_d // columns)](
        partial_out, partial_lse, partial_weight, ranges, partials_per_block, out, NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim,
        HEADS=heads, COLUMNS=columns, TILES=tiles_per_block, LANES=LANES, AHEAD=not is_many,
        num_warps=heads, enable_fp_fusion=False,
        **launch_options(out),
    )  # fmt: skip
