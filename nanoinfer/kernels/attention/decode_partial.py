"""Decode attention over single blocks or tiles (Flash-Decoding, Dao et al. 2023, with splits at fixed positions)."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention import spec
from nanoinfer.kernels.attention.online_softmax import attend_tile, finished, softmax_step, tile_logits
from nanoinfer.kernels.attention.shape import NO_WINDOW, KernelShape, decode_tiles, kv_descriptor, own_arguments
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs

SHORT_BLOCKS = tl.constexpr(spec.SHORT_BLOCKS)


@triton.jit
def attend_masked(
    acc, m, l,  # the running state: [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M] float32
    q_tile, kv, kv_rows, own,  # [BLOCK_M, BLOCK_D]; as `decode_partial_kernel` takes them
    block, token, first, head,  # of the item: its block in kv, its first token there and in the sequence; the KV head
    start,  # the tile to attend to
    begin, end,  # keys outside [begin, end) are not read
    READ: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TO_LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BY_TILE: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK_N)
    seen = (offsets >= begin) & (offsets < end)
    # Unseen tokens are not read: their memory may hold NaN, and 0 * NaN would reach the result.
    k_t, v = READ(
        kv, kv_rows, own, block, token, start, head, first + offsets, seen, q_tile,
        STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, True, False,
    )  # fmt: skip
    logits = tile_logits(q_tile, k_t, SCALE, SOFTCAP, PRECISION, WIDEN)
    logits = tl.where(seen[None, :], logits, float("-inf"))
    if BY_TILE:
        return attend_tile(acc, m, l, logits, v, TO_LOG2, PRECISION, WIDEN)
    else:
        return softmax_step(acc, m, l, logits, v, TO_LOG2, PRECISION, WIDEN)


@triton.jit
def attend_item(
    q_tile, kv, kv_rows, own, block, token, first, head,  # as in `attend_masked`
    begin, end,  # keys of the item that the query sees
    READ: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TO_LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, TMA: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    BY_TILE: tl.constexpr,  # attend to each tile separately and fold it; else the online softmax over the tiles
):  # fmt: skip
    """Return the sums over the item's keys: acc [BLOCK_M, BLOCK_D], their peak m [BLOCK_M] and weight l [BLOCK_M]."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if TMA:
        # Tiles that the query sees as a whole are loaded by the copy unit, which takes no mask. The first tile may be
        # cut by a window, the last by the sequence's end. The order of tiles is the same as without TMA.
        full = tl.minimum(tl.cdiv(begin, BLOCK_N) * BLOCK_N, end)
        full_end = tl.maximum(end // BLOCK_N * BLOCK_N, full)
        if WINDOWED:
            if begin < full:
                acc, m, l = attend_masked(
                    acc, m, l, q_tile, kv, kv_rows, own, block, token, first, head,
                    begin // BLOCK_N * BLOCK_N, begin, end, READ, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
                    TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, BLOCK_N, BY_TILE,
                )  # fmt: skip
        for start in tl.range(full, full_end, BLOCK_N, num_stages=STAGES):
            offsets = start + tl.arange(0, BLOCK_N)
            k_t, v = READ(
                kv, kv_rows, own, block, token, start, head, first + offsets, offsets < end, q_tile,
                STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, False, True,
            )  # fmt: skip
            logits = tile_logits(q_tile, k_t, SCALE, SOFTCAP, PRECISION, WIDEN)
            if BY_TILE:
                acc, m, l = attend_tile(acc, m, l, logits, v, TO_LOG2, PRECISION, WIDEN)
            else:
                acc, m, l = softmax_step(acc, m, l, logits, v, TO_LOG2, PRECISION, WIDEN)
        if full_end < end:
            acc, m, l = attend_masked(
                acc, m, l, q_tile, kv, kv_rows, own, block, token, first, head, full_end, begin, end,
                READ, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
                TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, BLOCK_N, BY_TILE,
            )  # fmt: skip
    else:
        for start in tl.range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N, num_stages=STAGES):
            acc, m, l = attend_masked(
                acc, m, l, q_tile, kv, kv_rows, own, block, token, first, head, start, begin, end,
                READ, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
                TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, BLOCK_N, BY_TILE,
            )  # fmt: skip
    return acc, m, l


@triton.jit
def dealt(program, number, programs):
    """Return the position of a program's item in round `number`; odd rounds are dealt out backwards."""
    return tl.where(number % 2 == 1, programs - 1 - program, program)


@triton.jit
def read_item(item, seq_lens, partials_per_block, listed):
    """Read (batch row, number in the row, block in kv, partial index), the row's length and its partials per block."""
    row = tl.load(item, mask=listed, other=0)
    number = tl.load(item + 1, mask=listed, other=0)
    block = tl.load(item + 2, mask=listed, other=0)
    partial = tl.load(item + 3, mask=listed, other=0)
    seq_len = tl.load(seq_lens + row, mask=listed, other=0)
    return row, number, block, partial, seq_len, tl.load(partials_per_block + row, mask=listed, other=1)


@triton.jit(
    do_not_specialize=["q_stride", "window"],
    # A work list may be any slice of a larger one: its alignment must not pick another binary.
    do_not_specialize_on_alignment=["items", "num_items", "partials_per_block", "seq_lens", "lse", "weight"],
)
def decode_partial_kernel(
    q,  # [B, num_q_heads, HEAD_DIM], rows q_stride apart
    kv,  # blocks as `KVPart.view` returns them, STRIDE values apart
    kv_rows,  # kv as a descriptor of rows of NUM_KV_HEADS * HEAD_DIM, with TMA
    own,  # the layer's tensors that its format wants, as a tuple, or None
    items,  # [capacity, 4] int32: batch row, number among all items of the row, block in kv, partial index
    num_items,  # [1] int32
    partials_per_block,  # [B] int32: the number of tiles in a block, or 1
    seq_lens,  # [B] int32
    out,  # [capacity, num_q_heads, HEAD_DIM] float32
    lse,  # [capacity, num_q_heads] float32
    weight,  # [capacity, num_q_heads] float32, written only for items that are tiles
    q_stride,
    window,
    READ: tl.constexpr,  # the format's function
    STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TO_LOG2: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TMA: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Persistent programs: the grid is fixed when a graph is captured, the number of items is read when it runs.
    head = tl.program_id(1)
    count = tl.load(num_items)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    in_q = (rows < GROUP_SIZE)[:, None] & (columns < HEAD_DIM)[None, :]
    q_heads = head * GROUP_SIZE + rows

    # The longest items come first. Every other round is dealt out backwards, so that a program that got a longer item
    # in one round gets a shorter one in the next.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rounds = count // programs
    rounds += (dealt(program, rounds, programs) < count - rounds * programs).to(tl.int32)
    # Each item is read while the previous item is computed, the first item while the previous kernel still runs.
    item = items + program * 4
    next_row, next_number, next_block, next_partial, next_len, next_partials = read_item(
        item, seq_lens, partials_per_block, rounds > 0
    )
    wait_for_inputs(PDL)
    let_next_in(PDL)
    for number in range(0, rounds):
        row = next_row.to(tl.int64)
        number_in_row = next_number
        block = next_block
        partial = next_partial.to(tl.int64)
        seq_len = next_len
        is_apart = next_partials > 1
        span = BLOCK_SIZE // next_partials
        item = items + ((number + 1) * programs + dealt(program, number + 1, programs)) * 4
        next_row, next_number, next_block, next_partial, next_len, next_partials = read_item(
            item, seq_lens, partials_per_block, number + 1 < rounds
        )

        q_row = q + row * tl.multiple_of(q_stride, 16)
        q_tile = tl.load(q_row + q_heads[:, None] * HEAD_DIM + columns[None, :], mask=in_q, other=0.0)
        first = number_in_row * span  # the item's first key in the sequence; modulo BLOCK_SIZE, in the block
        token = first % BLOCK_SIZE

        # Offsets in the item of the keys that the query at seq_len - 1 sees: [begin, end)
        begin = tl.maximum(seq_len - window - first, 0)
        end = tl.maximum(tl.minimum(seq_len - first, span), 0)
        # In a short row tiles are folded: in another batch they may be separate items, with the same bits.
        num_blocks = tl.cdiv(seq_len, BLOCK_SIZE) - tl.maximum(seq_len - window, 0) // BLOCK_SIZE
        if num_blocks <= SHORT_BLOCKS:
            acc, m, l = attend_item(
                q_tile, kv, kv_rows, own, block, token, first, head, begin, end,
                READ, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN,
                TMA, WINDOWED, BLOCK_M, BLOCK_N, STAGES, True,
            )  # fmt: skip
        else:
            acc, m, l = attend_item(
                q_tile, kv, kv_rows, own, block, token, first, head, begin, end,
                READ, STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN,
                TMA, WINDOWED, BLOCK_M, BLOCK_N, STAGES, False,
            )  # fmt: skip

        partial_heads = partial * (NUM_KV_HEADS * GROUP_SIZE) + q_heads
        if is_apart:
            tl.store(weight + partial_heads, l, mask=rows < GROUP_SIZE)
        else:
            acc, m = finished(acc, m, l)
        tl.store(lse + partial_heads, m, mask=rows < GROUP_SIZE)
        tl.store(out + partial_heads[:, None] * HEAD_DIM + columns[None, :], acc, mask=in_q)


def decode_partial(
    q: Tensor,
    kv: Tensor,
    items: Tensor,
    num_items: Tensor,
    partials_per_block: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    weight: Tensor,
    *,
    window: int | None,
    own: tuple[Tensor, ...] = (),
    shape: KernelShape,
    num_programs: int,
    after_copy: bool = False,
) -> None:
    """Attend to the listed items, which are whole blocks or separate tiles, and write the partial of each item.

    In a row that reads at most `SHORT_BLOCKS` blocks, each tile of a block is attended to separately, and the tiles
    are folded in ascending order. In longer rows the online softmax runs over the tiles, which is a little faster.

    A whole block leaves the mean in `out` and its natural log-sum-exp in `lse`. A separate tile leaves sums in `out`
    and `weight` and their peak (base 2) in `lse`; `merge` folds it. Products and sums are not fused, because the
    compiler would fuse other ones here than in `merge`.

    q: [B, num_q_heads, head_dim]; kv: one layer's pool or one ring slot, own: its layer's tensors, both as
    `decode_partial` of the backend takes them; items: [capacity, 4] int32; num_items: [1]
    int32; partials_per_block: [B] int32, items per block: its number of tiles, or 1; weight: shape as lse. num_programs
    changes which program computes an item, never its bits. after_copy: see `DecodeWork`.
    """
    tiles = decode_tiles(shape)
    decode_partial_kernel[(num_programs, shape.num_kv_heads)](
        q, kv, kv_descriptor(kv, tiles.block_n, shape), own_arguments(own), items, num_items, partials_per_block,
        seq_lens, out, lse, weight, q.stride(0), NO_WINDOW if window is None else window,
        **shape.constants(), STRIDE=kv.stride(0), WINDOWED=window is not None, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **launch_options(q, fuses=False, after_copy=after_copy),
    )  # fmt: skip
