"""Combine the partials of each row by their log-sum-exps (Flash-Decoding's reduction step).

The merge has two steps, and each has the same order in every batch:

1. The tiles of a block are folded one after the other, where `decode_partial` has not done so already.
2. Each of 32 lanes adds up every 32nd block. Then the second half of the lanes is added onto the first half, until one
   lane is left.

Lanes without a block hold zeros, so a row of few blocks gets the same bits from fewer lanes. The kernel is compiled
without fusing products and sums: what the compiler fuses would depend on how a program's tile lies in its threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.online_softmax import finished, finite, fold
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2

LANES = 32
"""Lane l adds up the blocks l, l + 32, l + 64, ... in this order."""
TILED_LANES = tl.constexpr(8)
"""Lanes for a row whose tiles are separate items; enough for all its blocks."""
FEW_BLOCKS = tl.constexpr(4)
FEW_ROW_HEADS = 128


def merge_launch(num_row_heads: int, num_q_heads: int, block_d: int) -> dict[str, int | bool]:
    """Choose the part of a row that one program (one warp) takes, from measurements on an H200.

    Returns constants of `merge_kernel`. No bit of the result depends on them.

    Few programs wait for memory, so they share a head and read ahead. With the registers that a whole head takes, 1,024
    programs are on the GPU at a time. More programs wait for their launch, so fewer are launched, each with more heads;
    most rows have few blocks.

    The next kernel is the output projection. Let in while few programs of this one still run, its own were put on the
    cores that had none: 320 programs on 32 of 132 cores, and they took 8 microseconds instead of 4. So few programs let
    it in at their end.
    """
    narrow, late = min(block_d, 32), num_row_heads <= FEW_ROW_HEADS
    if num_row_heads <= 512:
        return dict(HEADS=1, COLUMNS=narrow, CHUNK=narrow, AHEAD=4, LATE=late)
    if num_row_heads <= 1024:
        return dict(HEADS=1, COLUMNS=block_d, CHUNK=block_d, AHEAD=1, LATE=late)
    heads = next(count for count in (4, 2, 1) if num_q_heads % count == 0)
    return dict(HEADS=heads, COLUMNS=block_d, CHUNK=narrow, AHEAD=1, LATE=late)


@triton.jit
def read_partials(
    lse_row, out_row, numbers, count, heads, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Read partials [LANES, HEADS, COLUMNS] and lse [LANES, HEADS]; from number `count` on they are 0 and -inf."""
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
    """Like `read_partials`, for blocks whose tiles are separate items: fold the tiles of each block."""
    first = blocks * TILES
    at = first[:, None] * NUM_Q_HEADS + heads[None, :]
    parts, peak = read_partials(lse_row, out_row, first, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    weight = tl.load(weight_row + at, mask=(first < count)[:, None], other=0.0)
    for number in tl.static_range(1, TILES):
        # The row's last block may have fewer tiles: `count` masks what lies behind them.
        other, other_peak = read_partials(
            lse_row, out_row, first + number, count, heads, columns, NUM_Q_HEADS, HEAD_DIM
        )
        other_weight = tl.load(
            weight_row + at + number * NUM_Q_HEADS, mask=(first + number < count)[:, None], other=0.0
        )
        parts, peak, weight = fold(parts, peak, weight, other, other_peak, other_weight)
    return finished(parts, peak, weight)


@triton.jit
def add_lanes(x):
    """[LANES, HEADS, COLUMNS] -> [HEADS, COLUMNS]: add the second half onto the first until one is left."""
    for _ in tl.static_range(8):
        if x.shape[0] > 2:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2])), 0)
    return tl.sum(x, 0)


@triton.jit
def weights_of(lse, peak):
    """Return exp(lse - peak): [LANES, HEADS] -> [LANES, HEADS, 1]."""
    return tl.exp2((lse - peak[None, :]) * 1.4426950408889634)[:, :, None]


@triton.jit
def with_sink(total, sink, peak):
    """Add the weight of the heads' sinks, [HEADS] or None, to the sum of weights [HEADS, 1].

    Where it overflows, since a sink lies so far above all logits, the mean is 0, which it rounds to anyway.
    """
    if sink is not None:
        total += tl.exp2((sink - peak) * 1.4426950408889634)[:, None]
    return total


@triton.jit
def add_once(parts, lse, sink):
    """Sum at most one block per lane: return the weighted sum [HEADS, COLUMNS] and the sum of weights [HEADS, 1]."""
    peak = finite(tl.max(lse, 0))
    weights = weights_of(lse, peak)
    return add_lanes(weights * parts), with_sink(add_lanes(weights), sink, peak)


@triton.jit
def add_more(acc, total, parts, lse, peak):
    """Add one more block per lane to acc [LANES, HEADS, COLUMNS] and total [LANES, HEADS, 1]."""
    weights = weights_of(lse, peak)
    return acc + weights * parts, total + weights


@triton.jit
def read_once(
    lse_row, out_row, count, heads, sink, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Read up to `LANES` blocks and sum them with `add_once`."""
    parts, lse = read_partials(lse_row, out_row, tl.arange(0, LANES), count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
    return add_once(parts, lse, sink)


@triton.jit
def add_long(
    lse_row, out_row, count, heads, sink, columns, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Like `read_once`, for any number of blocks."""
    lanes = tl.arange(0, LANES)
    many = tl.arange(0, 4 * LANES)
    peak = tl.full([heads.shape[0]], float("-inf"), tl.float32)
    for start in range(0, count, 4 * LANES):
        at = (start + many)[:, None] * NUM_Q_HEADS + heads[None, :]
        lse = tl.load(lse_row + at, mask=(start + many < count)[:, None], other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse, 0))
    peak = finite(peak)
    acc = tl.zeros([LANES, heads.shape[0], columns.shape[0]], tl.float32)
    total = tl.zeros([LANES, heads.shape[0], 1], tl.float32)
    for start in range(0, count, AHEAD * LANES):
        at = start + lanes
        parts0, lse0 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        if AHEAD == 4:
            # These loads are in flight together: none of them waits for a sum.
            at += LANES
            parts1, lse1 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            at += LANES
            parts2, lse2 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
            at += LANES
            parts3, lse3 = read_partials(lse_row, out_row, at, count, heads, columns, NUM_Q_HEADS, HEAD_DIM)
        acc, total = add_more(acc, total, parts0, lse0, peak)
        if AHEAD == 4:
            acc, total = add_more(acc, total, parts1, lse1, peak)
            acc, total = add_more(acc, total, parts2, lse2, peak)
            acc, total = add_more(acc, total, parts3, lse3, peak)
    return add_lanes(acc), with_sink(add_lanes(total), sink, peak)


@triton.jit
def store_mean(target, columns, total, weight, HEAD_DIM: tl.constexpr):
    """Store total [HEADS, COLUMNS] / weight [HEADS, 1] at `target`, a pointer per head [HEADS]."""
    # + 0.0 turns -0.0 into 0.0: the sign of a zero would depend on the number of lanes.
    mean = total / tl.where(weight == 0.0, 1.0, weight) + 0.0
    inside = (columns < HEAD_DIM)[None, :]
    tl.store(target[:, None] + columns[None, :], mean.to(target.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=["partial_lse", "partial_weight", "ranges", "partials_per_block", "sinks"],
)
def merge_kernel(
    partial_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    partial_lse,  # [capacity, NUM_Q_HEADS] float32, natural log
    partial_weight,  # [capacity, NUM_Q_HEADS] float32, of items that are tiles
    ranges,  # [B + 1] int32
    partials_per_block,  # [B] int32
    sinks,  # [NUM_Q_HEADS] or None
    out,  # [B, NUM_Q_HEADS, HEAD_DIM]
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # of one program
    CHUNK: tl.constexpr,  # columns at a time, in rows of more than `FEW_BLOCKS` blocks
    TILES: tl.constexpr,  # items per block in rows whose tiles are separate items
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks of a lane read together, in long rows: 1 or 4
    LATE: tl.constexpr,  # let the next kernel in at the end
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = tl.load(ranges + row)
    count = tl.load(ranges + row + 1) - first
    per_block = tl.load(partials_per_block + row)
    lse_row = partial_lse + first.to(tl.int64) * NUM_Q_HEADS
    weight_row = partial_weight + first.to(tl.int64) * NUM_Q_HEADS
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32)
    wait_for_inputs(PDL)
    if not LATE:
        let_next_in(PDL)
    out_row = partial_out + first.to(tl.int64) * (NUM_Q_HEADS * HEAD_DIM)

    target = out + (row.to(tl.int64) * NUM_Q_HEADS + heads) * HEAD_DIM
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if TILES > 1 and per_block > 1:
        parts, lse = read_tiles(
            lse_row, out_row, weight_row, tl.arange(0, TILED_LANES), count, heads, columns, NUM_Q_HEADS, HEAD_DIM, TILES
        )
        total, weight = add_once(parts, lse, sink)
        store_mean(target, columns, total, weight, HEAD_DIM)
    elif count <= FEW_BLOCKS:
        total, weight = read_once(lse_row, out_row, count, heads, sink, columns, NUM_Q_HEADS, HEAD_DIM, FEW_BLOCKS)
        store_mean(target, columns, total, weight, HEAD_DIM)
    else:
        for begin in range(0, COLUMNS, CHUNK):
            chunk = tl.program_id(2) * COLUMNS + begin + tl.arange(0, CHUNK)
            if count <= LANES // 2:
                total, weight = read_once(
                    lse_row, out_row, count, heads, sink, chunk, NUM_Q_HEADS, HEAD_DIM, LANES // 2
                )
            elif count <= LANES:
                total, weight = read_once(lse_row, out_row, count, heads, sink, chunk, NUM_Q_HEADS, HEAD_DIM, LANES)
            else:
                total, weight = add_long(
                    lse_row, out_row, count, heads, sink, chunk, NUM_Q_HEADS, HEAD_DIM, LANES, AHEAD
                )
            store_mean(target, chunk, total, weight, HEAD_DIM)
    if LATE:
        let_next_in(PDL)


def merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    partial_weight: Tensor,
    ranges: Tensor,
    partials_per_block: Tensor,
    out: Tensor,
    *,
    tiles: int,
    sinks: Tensor | None = None,
) -> None:
    """out[b] = softmax-weighted mean of the partials ranges[b]:ranges[b + 1]; zeros for an empty range.

    sinks: [num_q_heads], a logit of each head that adds to the sum of weights, once; None: there is none.

    partial_out, partial_lse, partial_weight: as `decode_partial` writes them, [capacity, num_q_heads, head_dim] and
    [capacity, num_q_heads]; ranges: [B + 1] int32; partials_per_block: [B] int32, 1 or `tiles`; out: [B, num_q_heads,
    head_dim], contiguous. tiles: items per block of a row whose blocks are cut, 1 if no row's are. Such a row has at
    most `TILED_LANES` blocks, and its last block may have fewer items.
    """
    batch_size, num_q_heads, head_dim = out.shape
    if batch_size == 0:
        return
    block_d = next_power_of_2(head_dim)
    taken = merge_launch(batch_size * num_q_heads, num_q_heads, block_d)
    merge_kernel[(batch_size, num_q_heads // taken["HEADS"], block_d // taken["COLUMNS"])](
        partial_out, partial_lse, partial_weight, ranges, partials_per_block, sinks, out,
        NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, **taken, TILES=tiles, LANES=LANES, num_warps=1,
        **launch_options(out, fuses=False),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["items", "num_items"])
def store_partials_kernel(
    item_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM], any float type
    item_lse,  # [capacity, NUM_Q_HEADS] float32
    items,  # [capacity, 4] int32
    num_items,  # [1] int32
    out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    lse,  # [capacity, NUM_Q_HEADS] float32
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    item = tl.program_id(0)
    head = tl.program_id(1)
    if item < tl.load(num_items):
        source = item.to(tl.int64) * NUM_Q_HEADS + head
        target = tl.load(items + item * 4 + 3).to(tl.int64) * NUM_Q_HEADS + head
        columns = tl.arange(0, BLOCK_D)
        in_head = columns < HEAD_DIM
        value = tl.load(item_lse + source)
        # flash-attn says +inf where a row saw no key; the workspace says -inf
        tl.store(lse + target, tl.where(value == float("inf"), float("-inf"), value))
        row = tl.load(item_out + source * HEAD_DIM + columns, mask=in_head)
        tl.store(out + target * HEAD_DIM + columns, row.to(tl.float32), mask=in_head)


def store_partials(
    item_out: Tensor, item_lse: Tensor, items: Tensor, num_items: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Put partials computed by another library in their places: row i is partial items[i, 3], for i < num_items.

    item_out: [capacity, num_q_heads, head_dim]; item_lse: [capacity, num_q_heads] float32; both contiguous.
    """
    capacity, num_q_heads, head_dim = item_out.shape
    if capacity == 0:
        return
    store_partials_kernel[(capacity, num_q_heads)](
        item_out, item_lse, items, num_items, out, lse,
        NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
