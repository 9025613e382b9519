"""Prefill over KV that is not stored as products take it: keys and values are made once for all queries, in pieces.

In its loop a prefill kernel would make a key once for every tile of queries and every query head. A piece of the
history is written to a workspace as plain numbers instead, and the kernel of plain numbers attends to it. The running
softmax passes from one piece to the next as between two ring chunks, so where pieces are cut changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.shape import KernelShape, own_arguments
from nanoinfer.kernels.launch.sizes import largest_tile


class Piece(NamedTuple):
    """Sequences [first, last) of a key range, and columns [begin, end) of their block tables."""

    first: int
    last: int
    begin: int
    end: int


def pieces(num_blocks: Sequence[int], room: int) -> Iterator[Piece]:
    """Yield what a workspace of `room` blocks can hold at a time: several sequences, or a part of one.

    num_blocks: of each sequence. Its columns come in ascending order, and each sequence is in a piece at least.
    """
    first = 0
    while first < len(num_blocks):
        last, width = first + 1, max(1, num_blocks[first])
        while last < len(num_blocks) and max(width, num_blocks[last]) * (last + 1 - first) <= room:
            width, last = max(width, num_blocks[last]), last + 1
        for begin in range(0, width, room):
            yield Piece(first, last, begin, min(begin + room, width))
        first = last


@triton.jit(
    do_not_specialize=["table_stride", "width"],
    do_not_specialize_on_alignment=["block_table", "first_block", "kv_end"],
)  # fmt: skip
def expand_kv_kernel(
    kv,  # blocks as `KVPart.view` returns them, STRIDE numbers apart
    own,  # the layer's tensors that its format wants, as a tuple, or None
    out,  # [S * width, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    block_table,  # [S, at least width] int32, rows table_stride apart
    first_block, kv_end,  # [S] int32: as in `KeyRange`, of these columns
    table_stride, width,
    READ: tl.constexpr, STRIDE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    column = tl.program_id(0) // TILES
    start = tl.program_id(0) % TILES * BLOCK_N
    head = tl.program_id(1)
    seq = tl.program_id(2)
    end = tl.load(kv_end + seq)
    tokens = start + tl.arange(0, BLOCK_N)
    begin = (tl.load(first_block + seq) + column) * BLOCK_SIZE
    if begin + start >= end:
        return
    positions = begin + tokens
    block = tl.load(block_table + seq.to(tl.int64) * table_stride + column)
    k_t, v = READ(
        kv, None, own, block, 0, start, head, positions, positions < end, tl.zeros([1], out.dtype.element_ty),
        STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, True, False,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK_D)[None, :]
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    place = (seq * width + column).to(tl.int64) * (2 * BLOCK_SIZE * ROW)
    target = out + place + tokens[:, None] * ROW + head * HEAD_DIM + columns
    tl.store(target, tl.trans(k_t), mask=columns < HEAD_DIM)
    tl.store(target + BLOCK_SIZE * ROW, v, mask=columns < HEAD_DIM)


class PlainRange(NamedTuple):
    """A range of keys as `prefill` takes it: blocks of plain numbers, sequences, block table, whether others follow."""

    kv: Tensor
    sequences: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    block_table: Tensor
    store_state: bool


def expanded(
    key_range: PlainRange, num_blocks: Sequence[int], own: tuple[Tensor, ...], shape: KernelShape
) -> Iterator[PlainRange]:
    """Yield ranges of plain numbers, in the order of their use, that together are a range of stored KV.

    They take turns in one workspace: what is yielded holds until the next one is asked for. num_blocks: [S] columns of
    the block table that each sequence has blocks in; own: as `KVFormat.own` returns it; shape: of what is stored.
    """
    kv, (cu_seqlens_q, query_pos, first_block, kv_end, load_state), block_table, store_state = key_range
    room = min(shape.expanded_blocks, max(1, max(num_blocks)) * len(num_blocks))
    workspace = torch.empty(
        room, 2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=kv.device
    )
    columns = torch.arange(room, dtype=torch.int32, device=kv.device)
    for first, last, begin, end in pieces(num_blocks, room):
        width, some = end - begin, slice(first, last)
        firsts, ends, loads, goes_on = first_block[some], kv_end[some], load_state[some], end < num_blocks[first]
        if goes_on or begin:  # a part of one sequence
            firsts = firsts + begin
            ends = torch.minimum(ends, (firsts + width) * shape.block_size)
            loads = torch.ones_like(loads) if begin else loads
        expand_kv(kv, own, workspace, block_table[some, begin:end], firsts, ends, shape=shape)
        sequences = cu_seqlens_q[first : last + 1], query_pos[some], firsts, ends, loads
        table = columns[: (last - first) * width].view(-1, width)
        yield PlainRange(workspace, sequences, table, store_state or goes_on)


def expand_kv(
    kv: Tensor,
    own: tuple[Tensor, ...],
    out: Tensor,
    block_table: Tensor,
    first_block: Tensor,
    kv_end: Tensor,
    *,
    shape: KernelShape,
) -> None:
    """Write the keys and values of blocks as numbers of the model's dtype.

    kv: blocks as `KVPart.view` returns them; own: as `KVFormat.own` returns it; block_table: [S, W] int32; first_block,
    kv_end: [S] int32, the logical block of column 0, and the position behind the last token: what lies behind it is not
    read. out: [S * W, 2, block_size, num_kv_heads, head_dim], row after row; shape: of what is read.
    """
    (num_sequences, width), tile = block_table.shape, largest_tile(shape.block_size, 32)
    names = "READ", "NUM_KV_HEADS", "HEAD_DIM", "BLOCK_D", "BLOCK_SIZE"
    constants = {name: value for name, value in shape.constants().items() if name in names}
    expand_kv_kernel[(width * (shape.block_size // tile), shape.num_kv_heads, num_sequences)](
        kv, own_arguments(own), out, block_table, first_block, kv_end, block_table.stride(0), width,
        **constants, STRIDE=kv.stride(0), BLOCK_N=tile, enable_fp_fusion=False,
    )  # fmt: skip
