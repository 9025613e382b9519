"""Projections of 33 to 256 rows on Hopper, tiled over rows and weight, with what comes before and after them.

Here the library's products take two to four times their weights' bytes: they begin only when the kernel in front has
ended, leave cores without work, and the gate needs a launch of its own. These kernels bring tiles through the copy unit,
are cut so that there is about one program for each core, and start early (see `pdl`).

Rounding follows `nanoinfer.layers`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.activation import activate
from nanoinfer.kernels.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.rms_norm import rounded

MAX_ROWS = 256
CAPABILITY = 9
"""Of the GPUs on which the tile sizes were measured, the only ones that take this kernel."""
LARGE_WEIGHT = 2**24
"""Of a larger weight the library's product wins from more rows on than `ROWS_OF_LARGE`: it is bound by the matrix units."""
ROWS_OF_LARGE = 64
BLOCK_M = 64
PROGRAMS = 132
"""About as many run at a time where one fills a core's shared memory."""
MAX_SPLITS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def tile_linear_kernel(
    x_rows,  # descriptor of [num_tokens, SIZE], boxes of BLOCK_M x BLOCK_K
    weight_rows,  # descriptor of [GATED ? 2 * num_rows : num_rows, SIZE], gate first, boxes of BLOCK_N x BLOCK_K
    bias,  # as many values as weight has rows, read with BIAS
    out,  # [num_tokens, num_rows], or [splits, num_tokens, num_rows] float32 where SPLIT_SIZE < SIZE
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,  # columns of one program
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same rows of the weight follow each other: one of them reads these from memory.
    first_token = tl.program_id(0) * BLOCK_M
    first_row = tl.program_id(1) * BLOCK_N
    begin = tl.program_id(2) * SPLIT_SIZE
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # What a box has beyond the tensor's end is zero.
    for column in tl.range(begin, begin + SPLIT_SIZE, BLOCK_K, num_stages=STAGES):
        value = x_rows.load([first_token, column])
        acc = tl.dot(value, weight_rows.load([first_row, column]).T, acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(value, weight_rows.load([num_rows + first_row, column]).T, up, input_precision=PRECISION)
    let_next_in(PDL)
    token = first_token + tl.arange(0, BLOCK_M)
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    result = acc
    if SPLIT_SIZE == SIZE:
        if BIAS:
            result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if BIAS:
                up += tl.load(bias + num_rows + row, mask=inside, other=0.0).to(tl.float32)[None, :]
            result = rounded(activate(rounded(result, out), GELU), out) * rounded(up, out)
    target = (tl.program_id(2) * num_tokens + token[:, None]) * num_rows + row[None, :]
    stored = (token < num_tokens)[:, None] & inside[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stored)


def tile_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    num_splits: int = 1,
) -> Tensor:
    """`linear.rows_linear` for up to `MAX_ROWS` rows, which do not lack the division by their rms.

    num_splits: more than one must divide size / 128.
    """
    num_tokens, size = x.shape
    gated = activation is not None
    num_rows = weight.shape[0] // (2 if gated else 1)
    out_shape = (num_tokens, num_rows) if num_splits == 1 else (num_splits, num_tokens, num_rows)
    out = torch.empty(out_shape, dtype=x.dtype if num_splits == 1 else torch.float32, device=x.device)
    block_n, block_k, stages = _tiles(num_tokens, num_rows, gated)
    assert num_splits == 1 or size % (num_splits * block_k) == 0, "a split is whole boxes"
    grid = (triton.cdiv(num_tokens, BLOCK_M), triton.cdiv(num_rows, block_n), num_splits)
    tile_linear_kernel[grid](
        TensorDescriptor(x, [num_tokens, size], [size, 1], [BLOCK_M, block_k]),
        TensorDescriptor(weight, list(weight.shape), [size, 1], [block_n, block_k]),
        x if bias is None else bias, out, num_tokens, num_rows,
        SIZE=size, SPLIT_SIZE=size // num_splits, BIAS=bias is not None, GATED=gated,
        GELU=activation not in (None, "silu"), PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=4, **launch_options(x),
    )  # fmt: skip
    return out


def _programs(num_tokens: int, num_rows: int, block_n: int) -> int:
    return triton.cdiv(num_tokens, BLOCK_M) * triton.cdiv(num_rows, block_n)


def _tiles(num_tokens: int, num_rows: int, gated: bool) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, stages) from an H200: one program a core with all of its memory, or three where that is too few."""
    if not gated:
        return (64, 128, 6) if _programs(num_tokens, num_rows, 64) <= PROGRAMS else (128, 128, 4)
    if _programs(num_tokens, num_rows, 32) <= PROGRAMS:
        return (32, 128, 4)
    return (64, 128, 4) if _programs(num_tokens, num_rows, 64) <= PROGRAMS else (32, 64, 4)


def tile_splits(size: int, num_rows: int, num_tokens: int) -> int:
    """Splits of the columns: as many as there are cores for."""
    block_n, block_k, _ = _tiles(num_tokens, num_rows, gated=False)
    programs = _programs(num_tokens, num_rows, block_n)
    possible = (
        splits for splits in (MAX_SPLITS, 2) if size % (splits * block_k) == 0 and splits * programs <= PROGRAMS
    )
    return next(possible, 1)


def takes_tiles(num_tokens: int, weight: Tensor) -> bool:
    """Whether this kernel is there on the weight's GPU and, for so many rows of x, faster than the library."""
    if _capability(weight.device) != CAPABILITY:
        return False
    return num_tokens <= (MAX_ROWS if weight.numel() <= LARGE_WEIGHT else ROWS_OF_LARGE)


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
