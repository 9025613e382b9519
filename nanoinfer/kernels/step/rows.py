"""The rows' persistent state: what a decode step reads of it before its first layer, and what the host changes in it.

Each takes one launch instead of nine or ten.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit(do_not_specialize=["width", "columns", "stride"], do_not_specialize_on_alignment=["batch_rows"])
def step_inputs_kernel(
    batch_rows,  # [size] int32
    row_tokens,  # [rows] int64
    row_lengths,  # [rows] int32
    block_table,  # [rows, groups * columns] int32
    tokens,  # [size] int64
    lengths,  # [size] int32
    positions,  # [size] int64
    slots,  # [groups, size] int64
    block_sizes,  # [groups] int32
    width,
    columns,
    stride,
):
    index, group = tl.program_id(0), tl.program_id(1)
    row = tl.load(batch_rows + index).to(tl.int64)
    length = tl.load(row_lengths + row)
    position, block_size = length - 1, tl.load(block_sizes + group)
    block = tl.load(block_table + row * width + group * columns + position // block_size).to(tl.int64)
    if group == 0:
        tl.store(tokens + index, tl.load(row_tokens + row))
        tl.store(lengths + index, length)
        tl.store(positions + index, position.to(tl.int64))
    tl.store(slots + group * stride + index, block * block_size + position % block_size)


def step_inputs(batch_rows: Tensor, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...], sizes: Tensor) -> None:
    """Write for each batch row its token, its length with that token, and the token's position and slots.

    batch_rows: [size] int32; state: the rows' tokens [rows] int64, lengths [rows] int32 and block tables [rows, width]
    int32, those of all groups of layers side by side; inputs, out: tokens, lengths, positions, [size] each, and slots,
    [groups, size], the lengths int32 and the others int64; sizes: [groups] int32, the tokens of a block.
    """
    width, slots, num_groups = state[2].shape[1], inputs[3], len(sizes)
    step_inputs_kernel[(len(batch_rows), num_groups)](
        batch_rows,
        *state,
        *inputs,
        sizes,
        width,
        width // num_groups,
        slots.stride(0),
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["lines"])
def update_rows_kernel(
    lines,  # [n, 3 + width] int32: row, token, length, block table
    row_tokens,  # [rows] int64
    row_lengths,  # [rows] int32
    block_table,  # [rows, width] int32
    width,
    KEPT: tl.constexpr,  # in place of a token: the row keeps the token that it has
    TILE: tl.constexpr,
):
    line = lines + tl.program_id(0).to(tl.int64) * (3 + width)
    row = tl.load(line).to(tl.int64)
    if tl.program_id(1) == 0:
        token = tl.load(line + 1)
        if token != KEPT:
            tl.store(row_tokens + row, token.to(tl.int64))
        tl.store(row_lengths + row, tl.load(line + 2))
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    tl.store(block_table + row * width + column, tl.load(line + 3 + column, mask=inside), mask=inside)


def update_rows(lines: Tensor, state: tuple[Tensor, ...], kept: int) -> None:
    """Write lines [n, 3 + width] int32 (row, token, length, block table) into the rows. No row is listed twice.

    state: the rows' tokens [rows] int64, lengths [rows] int32 and block table [rows, width] int32. With `kept` in place
    of a token, the row keeps the token that it has.
    """
    block_table = state[2]
    width = block_table.shape[1]
    assert lines.shape[1] == 3 + width and lines.is_contiguous() and block_table.is_contiguous(), "lines must be packed"
    update_rows_kernel[(len(lines), triton.cdiv(width, TILE))](
        lines, *state, width, KEPT=kept, TILE=TILE, num_warps=4, enable_fp_fusion=True
    )
