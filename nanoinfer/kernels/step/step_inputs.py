"""What a decode step reads before its first layer, gathered from the rows' state by one launch instead of ten."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["batch_rows"])
def step_inputs_kernel(
    batch_rows,  # [size] int32
    row_tokens,  # [rows] int64
    row_lengths,  # [rows] int32
    block_table,  # [rows, width] int32
    tokens,  # [size] int64
    lengths,  # [size] int32
    positions,  # [size] int64
    slots,  # [size] int64
    width,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(batch_rows + index).to(tl.int64)
    length = tl.load(row_lengths + row)
    position = length - 1
    block = tl.load(block_table + row * width + position // BLOCK_SIZE).to(tl.int64)
    tl.store(tokens + index, tl.load(row_tokens + row))
    tl.store(lengths + index, length)
    tl.store(positions + index, position.to(tl.int64))
    tl.store(slots + index, block * BLOCK_SIZE + position % BLOCK_SIZE)


def step_inputs(batch_rows: Tensor, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...], block_size: int) -> None:
    """Write for each batch row its token, its length with that token, and the token's position and slot.

    batch_rows: [size] int32; state: the rows' tokens [rows] int64, lengths [rows] int32 and block table [rows, width]
    int32; inputs, out: tokens, lengths, positions and slots, [size] each, the lengths int32 and the others int64.
    """
    width = state[2].shape[1]
    step_inputs_kernel[(len(batch_rows),)](batch_rows, *state, *inputs, width, BLOCK_SIZE=block_size, num_warps=1)
