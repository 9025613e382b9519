"""Prefill attention over paged KV (FlashAttention-2, Dao 2023, algorithm 1), which can pause between buffers.

Resident prefill is one key range, offload prefill may be many. Both run the same binary: whether the state is loaded
or stored is a run-time value. How a tile of keys is treated depends on its absolute position alone, and the state
(acc, m, l) is stored in the float32 it is computed in, so a cut at a block boundary does not change a bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.online_softmax import finite, softmax_step, tile_logits
from nanoinfer.kernels.attention.shape import NO_WINDOW, KernelShape, Tiles, kv_descriptor


@triton.jit
def attend_tiles(
    acc, m, l,  # the running state: [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M] float32
    q_tile, positions,  # [BLOCK_M, BLOCK_D], [BLOCK_M]: queries and their absolute positions
    kv, kv_rows, head,  # as `prefill_kernel` takes them; the KV head
    table, range_start,  # this sequence's block table, position of its column 0
    begin, end,  # tiles of keys to attend to, absolute; begin is a multiple of BLOCK_N
    first_key, kv_end, window,  # keys outside [first_key, kv_end) are not read
    MASKED: tl.constexpr, READ: tl.constexpr, STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TO_LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    TMA: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tokens = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        block = tl.load(table + (start - range_start) // BLOCK_SIZE)
        keys = start + tokens
        # Memory of tokens that do not exist may hold NaN, and 0 * NaN would reach the result.
        exists = (keys >= first_key) & (keys < kv_end)
        k_t, v = READ(
            kv, kv_rows, None, block, 0, start % BLOCK_SIZE, head, keys, exists, q_tile,
            STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, MASKED, TMA,
        )  # fmt: skip
        logits = tile_logits(q_tile, k_t, SCALE, SOFTCAP, PRECISION, WIDEN)
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
            logits = tl.where(seen & exists[None, :], logits, float("-inf"))
        acc, m, l = softmax_step(acc, m, l, logits, v, TO_LOG2, PRECISION, WIDEN)
    return acc, m, l


@triton.jit(
    do_not_specialize=["q_stride", "table_stride", "store_state", "window"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q", "query_pos", "first_block", "kv_end", "load_state", "block_table", "state_m", "state_l",
        "sinks",
    ],
)  # fmt: skip
def prefill_kernel(
    q,  # [num_tokens, num_q_heads, HEAD_DIM], rows q_stride apart
    kv,  # blocks of numbers of q's dtype as `KVPart.view` returns them, STRIDE of them apart
    kv_rows,  # kv as a descriptor of rows of NUM_KV_HEADS * HEAD_DIM, with TMA
    out,  # [num_tokens, num_q_heads, HEAD_DIM]
    state_acc, state_m, state_l,  # [num_tokens, num_q_heads, HEAD_DIM], [num_tokens, num_q_heads] twice; float32
    cu_seqlens_q, query_pos, first_block, kv_end, load_state,  # [S + 1], then [S] each; int32
    block_table,  # [S, W] int32, rows table_stride apart
    sinks,  # [num_q_heads] or None
    q_stride, table_stride, store_state, window,
    READ: tl.constexpr, STRIDE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TO_LOG2: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, TMA: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    seq = tl.program_id(2)
    q_begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_begin
    tile = tl.cdiv(q_len, BLOCK_M) - 1 - tl.program_id(0)  # last queries first: they have the most keys
    if tile < 0:
        return
    pos = tl.load(query_pos + seq)
    range_start = tl.load(first_block + seq) * BLOCK_SIZE
    keys_end = tl.load(kv_end + seq)
    resume = tl.load(load_state + seq)  # 0 or 1

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    in_row = rows < q_len
    in_tile = in_row[:, None] & (columns < HEAD_DIM)[None, :]
    token = (q_begin + rows).to(tl.int64)
    token_head = token * (NUM_KV_HEADS * GROUP_SIZE) + head
    q_pointers = q + token[:, None] * tl.multiple_of(q_stride, 16) + head * HEAD_DIM + columns[None, :]
    q_tile = tl.load(q_pointers, mask=in_tile, other=0.0)
    state_pointers = state_acc + token_head[:, None] * HEAD_DIM + columns[None, :]
    in_state = rows < q_len * resume
    acc = tl.load(state_pointers, mask=in_state[:, None] & in_tile, other=0.0)
    m = tl.load(state_m + token_head, mask=in_state, other=float("-inf"))
    l = tl.load(state_l + token_head, mask=in_state, other=0.0)

    # Keys that some query of this tile sees: [begin, end). Keys that every query sees: whole tiles in [full, full_end).
    positions = pos + rows
    first_query = pos + tile * BLOCK_M
    last_query = pos + tl.minimum(tile * BLOCK_M + BLOCK_M, q_len) - 1
    first_key = tl.maximum(first_query - window + 1, 0)
    begin = tl.maximum(first_key // BLOCK_N * BLOCK_N, range_start)
    end = tl.minimum(keys_end, last_query + 1)
    full = tl.maximum(tl.cdiv(tl.maximum(last_query - window + 1, 0), BLOCK_N) * BLOCK_N, begin)
    full_end = tl.minimum(keys_end, first_query + 1) // BLOCK_N * BLOCK_N
    kv_head = head // GROUP_SIZE
    table = block_table + seq.to(tl.int64) * table_stride
    if WINDOWED:  # without a window no first tile is cut, and an empty loop would cost registers
        acc, m, l = attend_tiles(
            acc, m, l, q_tile, positions, kv, kv_rows, kv_head, table, range_start, begin,
            tl.minimum(full, end), first_key, keys_end, window, True, READ, STRIDE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
            BLOCK_SIZE, TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, TMA, BLOCK_N,
        )  # fmt: skip
    acc, m, l = attend_tiles(
        acc, m, l, q_tile, positions, kv, kv_rows, kv_head, table, range_start, full, full_end,
        first_key, keys_end, window, False, READ, STRIDE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, TMA, BLOCK_N,
    )  # fmt: skip
    acc, m, l = attend_tiles(
        acc, m, l, q_tile, positions, kv, kv_rows, kv_head, table, range_start, tl.maximum(full, full_end),
        end, first_key, keys_end, window, True, READ, STRIDE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        TO_LOG2, SCALE, SOFTCAP, PRECISION, WIDEN, TMA, BLOCK_N,
    )  # fmt: skip

    if store_state != 0:
        tl.store(state_pointers, acc, mask=in_tile)
        tl.store(state_m + token_head, m, mask=in_row)
        tl.store(state_l + token_head, l, mask=in_row)
    else:
        if sinks is not None:
            # As in `with_sink` of the merge; m is base 2.
            sink = tl.load(sinks + head).to(tl.float32)
            l += tl.exp2(tl.fma(tl.full(m.shape, 1.4426950408889634, tl.float32), sink, -finite(m)))
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        out_pointers = out + token_head[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=in_tile)


def prefill(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    sequences: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    block_table: Tensor,
    *,
    max_query_len: int,
    store_state: bool,
    window: int | None,
    sinks: Tensor | None = None,
    shape: KernelShape,
    tiles: Tiles,
) -> None:
    """Causal attention of packed queries to one range of each sequence's KV.

    q, out: [num_tokens, num_q_heads, head_dim]; state: (acc, m, l), float32, m in base 2, acc not normalised;
    sequences: (cu_seqlens_q [S + 1], query_pos, first_block, kv_end, load_state [S]), int32; block_table: [S, W] int32;
    sinks: as in `merge`.
    """
    num_sequences = block_table.shape[0]
    if num_sequences == 0 or max_query_len == 0:
        return
    prefill_kernel[(triton.cdiv(max_query_len, tiles.block_m), shape.num_q_heads, num_sequences)](
        q, kv, kv_descriptor(kv, tiles.block_n, shape), out, *state, *sequences, block_table, sinks,
        q.stride(0), block_table.stride(0), int(store_state), NO_WINDOW if window is None else window,
        **shape.constants(), STRIDE=kv.stride(0), WINDOWED=window is not None, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
