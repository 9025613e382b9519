"""Changed rows of the persistent state, written by one launch instead of nine."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


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
    update_rows_kernel[(len(lines), triton.cdiv(width, TILE))](lines, *state, width, KEPT=kept, TILE=TILE, num_warps=4)
