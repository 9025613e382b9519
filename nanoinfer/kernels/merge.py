"""Combine the partials of each row's splits by their log-sum-exps (Flash-Decoding's reduction step)."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.shape import next_power_of_2

LSE_TILE = 128
MANY_PROGRAMS = 512


def split_tile(num_programs: int) -> int:
    """Splits added at a time.

    Few programs wait for memory: 128 splits at a time make 4 dependent steps of 512 splits (128k tokens). Many programs
    keep the cores busy, and smaller tiles let more of them run at once. The choice depends on the padded batch alone,
    and so do the bits.
    """
    return 128 if num_programs <= MANY_PROGRAMS else 32


@triton.jit(do_not_specialize_on_alignment=["partial_lse", "ranges"])
def merge_kernel(
    partial_out,  # [capacity, num_q_heads, HEAD_DIM] float32
    partial_lse,  # [capacity, num_q_heads] float32, natural log
    ranges,  # [B + 1] int32
    out,  # [B, num_q_heads, HEAD_DIM]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LSE_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    first = tl.load(ranges + row)
    count = tl.load(ranges + row + 1) - first
    lse_head = partial_lse + first.to(tl.int64) * num_q_heads + head
    out_head = partial_out + (first.to(tl.int64) * num_q_heads + head) * HEAD_DIM

    lse_splits = tl.arange(0, LSE_TILE)
    peaks = tl.full([LSE_TILE], float("-inf"), tl.float32)
    for start in range(0, count, LSE_TILE):
        splits = start + lse_splits
        lse = tl.load(lse_head + splits * num_q_heads, mask=splits < count, other=float("-inf"))
        peaks = tl.maximum(peaks, lse)
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # no split saw a key: all weights become 0, not NaN

    columns = tl.arange(0, BLOCK_D)
    in_head = columns < HEAD_DIM
    split_lanes = tl.arange(0, SPLIT_TILE)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for start in range(0, count, SPLIT_TILE):
        splits = start + split_lanes
        lse = tl.load(lse_head + splits * num_q_heads, mask=splits < count, other=float("-inf"))
        weights = tl.exp2((lse - peak) * 1.4426950408889634)
        outs = tl.load(
            out_head + splits[:, None] * (num_q_heads * HEAD_DIM) + columns[None, :],
            mask=(splits < count)[:, None] & in_head[None, :],
            other=0.0,
        )
        acc += tl.sum(weights[:, None] * outs, 0)
        total += tl.sum(weights, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    target = out + (row.to(tl.int64) * num_q_heads + head) * HEAD_DIM + columns
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_head)


def merge(partial_out: Tensor, partial_lse: Tensor, ranges: Tensor, out: Tensor) -> None:
    """out[b] = softmax-weighted mean of the partials ranges[b]:ranges[b + 1]; zeros where there is none.

    partial_out: [capacity, num_q_heads, head_dim] float32; partial_lse: [capacity, num_q_heads] float32, natural log;
    ranges: [B + 1] int32; out: [B, num_q_heads, head_dim], contiguous.
    """
    batch_size, num_q_heads, head_dim = out.shape
    if batch_size == 0:
        return
    merge_kernel[(batch_size, num_q_heads)](
        partial_out, partial_lse, ranges, out,
        HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), LSE_TILE=LSE_TILE, SPLIT_TILE=split_tile(batch_size * num_q_heads), num_warps=4,
    )  # fmt: skip
