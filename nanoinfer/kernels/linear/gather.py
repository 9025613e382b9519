"""Rows of a table that may lie in pinned host memory, which the GPU reads by itself: only it knows which rows."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs

_MOST_COLUMNS = 2048


@triton.jit
def gather_rows_kernel(
    table,  # [rows, SIZE]
    ids,  # [N]
    out,  # [N, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_in(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + index).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(table + row * SIZE + at, mask=at < SIZE)
    tl.store(out + index * SIZE + at, values, mask=at < SIZE)


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a table, [rows, size], on the device of the ids: [N] -> [N, size] in its dtype."""
    if table.device == ids.device:
        return F.embedding(ids, table)
    return copy_rows(table, ids)


def copy_rows(table: Tensor, ids: Tensor) -> Tensor:
    """As `gather_rows`, by the kernel, wherever the table lies."""
    size = table.shape[1]
    out = table.new_empty(len(ids), size, device=ids.device)
    if len(ids):
        block = min(_MOST_COLUMNS, triton.next_power_of_2(size))
        grid = len(ids), triton.cdiv(size, block)
        gather_rows_kernel[grid](table, ids, out, SIZE=size, BLOCK=block, num_warps=4, **launch_options(out))
    return out
