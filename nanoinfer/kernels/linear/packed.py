"""Products of up to `MAX_ROWS` rows with packed weights, expanded inside the kernel.

A program takes some rows of the weight and all columns of a part of the sum, block by block, plane by plane: so K
ascends as in `rows` and `tiles`, and the bits are those of the product with the expanded matrix. The weight is the left
operand: its planes go from registers into the matrix units. With a gate, half of a program's rows are gate rows and the
other half the up rows that belong to them, so that both are one product, shared out evenly among the warps.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import ACTIVATIONS
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.kernels.linear.expand import (
    COLUMN,
    constants_of,
    first_blocks,
    scales_of_plane,
    scales_of_rows,
    tensors_of,
    weights_of_plane,
)
from nanoinfer.kernels.linear.packing import PackedWeight
from nanoinfer.kernels.linear.tiles import finished_product

MAX_PLANES = 8
"""The most planes of one step of the loop."""
LARGE_SHARED_MEMORY = 160 * 1024
"""From so many bytes for a program on, tiles for many rows are loaded one more step ahead."""
LARGE_OUTPUT = 2**14
"""A weight of so many rows gives enough programs even if each of them takes more rows."""


@triton.jit(do_not_specialize=["num_tokens"])
def packed_linear_kernel(
    x,  # [num_tokens, SIZE]
    words, scales, zeros, global_scale, group_index,  # see `PackedWeight`; with GATED rows of gate, then of up
    bias,  # one value per row of weight, read with BIAS
    out,  # [num_tokens, num_rows], or [parts, num_tokens, num_rows] float32 where PART_SIZE < SIZE
    num_tokens,
    num_rows,
    SIZE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr, WORD: tl.constexpr, ZEROS: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, EXPANSION: tl.constexpr, FOLD: tl.constexpr, FOLD_ZERO: tl.constexpr,
    PRODUCT: tl.constexpr, RESULT: tl.constexpr,
    PART_SIZE: tl.constexpr,  # columns of one program
    UNROLL: tl.constexpr,  # blocks of one step
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,  # OUT_N divides num_rows
    EVEN_SIZE: tl.constexpr,  # UNROLL * BLOCK divides PART_SIZE
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs that share rows of the weight follow each other, so only one of them reads these rows from memory.
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < num_tokens
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_row = tl.program_id(1) * OUT_N
    in_tile = tl.arange(0, BLOCK_N)
    all_rows = num_rows
    row = first_row + in_tile % OUT_N if GATED else first_row + in_tile
    if not EVEN:  # rows beyond the last are computed as the last, and not stored
        row = tl.minimum(row, num_rows - 1)
    if GATED:
        all_rows = 2 * num_rows
        row += in_tile // OUT_N * num_rows
    at = tl.arange(0, PLANE)
    begin = tl.program_id(2) * PART_SIZE
    end = begin + PART_SIZE
    ALIGNED: tl.constexpr = PART_SIZE % GROUP == 0 and (UNROLL * BLOCK) % GROUP == 0
    wait_for_inputs(PDL)
    of_row = scales_of_rows(
        scales, zeros, global_scale, row, MODE, ZEROS, SCALE, FACTOR, ROWS, EXPANSION, PRODUCT, WORD, FOLD, FOLD_ZERO
    )  # fmt: skip
    x_tile = x + token.to(tl.int64)[None, :] * SIZE + at[:, None]
    word_tile = words + row[:, None] * PLANE + at[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, UNROLL * BLOCK, num_stages=STAGES):
        first = start // BLOCK
        for u in tl.static_range(UNROLL):
            block = first + u
            if not EVEN_SIZE:  # beyond the last, x is 0
                block = tl.minimum(block, (SIZE - 1) // BLOCK)
            tile = tl.load(word_tile + block.to(tl.int64) * all_rows * PLANE)
            for p in tl.static_range(16 // BITS):
                column = start + u * BLOCK + p * PLANE
                if EVEN_SIZE:
                    value = tl.load(x_tile + column, mask=live[None, :], other=0.0)
                else:
                    value = tl.load(x_tile + column, mask=live[None, :] & (column + at < end)[:, None], other=0.0)
                scale, zero = scales_of_plane(
                    scales, zeros, global_scale, group_index, of_row, row, all_rows, first, u * BLOCK + p * PLANE,
                    SIZE, BLOCK, PLANE, GROUP, ROWS, MODE, ALIGNED, EVEN_SIZE, ZEROS, KIND, BITS, SCALE, FACTOR,
                    EXPANSION, PRODUCT, FOLD, FOLD_ZERO,
                )  # fmt: skip
                weight = weights_of_plane(
                    tile, scale, zero, x, p, ZEROS, FOLD_ZERO, KIND, BITS, EXPANSION, PRODUCT, RESULT
                )
                if not EVEN_SIZE:  # what lies beyond may be infinite, and its product with 0 no number
                    weight = tl.where((column + at < end)[None, :], weight, 0.0)
                acc = tl.dot(weight, value, acc, input_precision="ieee")
    let_next_in(PDL)
    result = tl.trans(acc)
    up = result
    if GATED:
        result, up = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, OUT_N]), (0, 2, 1)))
    out_row = first_row + tl.arange(0, OUT_N)
    inside = out_row < num_rows
    if PART_SIZE == SIZE:
        result = finished_product(result, up, bias, out_row, inside, num_rows, out, BIAS, GATED, GELU)
    target = (tl.program_id(2) * num_tokens + token).to(tl.int64)[:, None] * num_rows + out_row[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    num_parts: int = 1,
) -> Tensor | None:
    """Compute `rows.linear`, with `num_parts` above 1 `rows.linear_parts`, with the matrix that a weight stands for.

    Args:
        x: [N, in_features], packed rows; in bfloat16 or float16.

    Returns:
        Their result; None where the matrix must be expanded first: for more rows, in float32, and for an activation
        without a kernel.
    """
    num_tokens, size = x.shape
    gated = activation is not None
    if x.element_size() != 2 or num_tokens > MAX_ROWS or (gated and activation not in ACTIVATIONS):
        return None
    assert size == weight.in_features, f"{size} columns instead of {weight.in_features}"
    assert x.is_contiguous() and x.data_ptr() % 16 == 0, "rows must be packed, and begin where all others do"
    num_rows = weight.num_rows // (2 if gated else 1)
    if out is None:
        shape, dtype = (num_tokens, num_rows), x.dtype
        if num_parts > 1:
            shape, dtype = (num_parts, *shape), torch.float32
        out = torch.empty(shape, dtype=dtype, device=x.device)
    assert out.is_contiguous(), "rows must be packed"
    if num_tokens == 0:
        return out
    constants, part_size = constants_of(weight, x.device, x.dtype), size // num_parts
    tiles = packed_tiles(num_tokens, weight.num_rows, gated, constants, x.device)
    block_m, block_n, num_warps, stages, columns = tiles
    unroll = _blocks_of_step(part_size, columns, constants)
    if unroll * constants["BLOCK"] > columns:  # as many columns are loaded ahead, in fewer steps
        stages = max(2, stages * columns // (unroll * constants["BLOCK"]))
    if constants["MODE"] == COLUMN.value:  # a tile of scales for each plane would take all shared memory
        stages = 1
    grid = (triton.cdiv(num_tokens, block_m), triton.cdiv(weight.num_rows, block_n), num_parts)
    packed_linear_kernel[grid](
        x, *tensors_of(weight), x if bias is None else bias, out, num_tokens, num_rows, **constants,
        PART_SIZE=part_size, UNROLL=unroll, BIAS=bias is not None, GATED=gated, GELU=activation not in (None, "silu"),
        EVEN=weight.num_rows % block_n == 0,
        EVEN_SIZE=part_size % (unroll * constants["BLOCK"]) == 0, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages,
        num_warps=num_warps, **launch_options(x),
    )  # fmt: skip
    return out


def _blocks_of_step(part_size: int, columns: int, constants: dict) -> int:
    """Return how many blocks make up about so many columns: as many as divide a part of a sum, if any do.

    Of narrow planes fewer columns: each plane is code of its own, and many take the compiler tens of seconds.
    """
    block, least = constants["BLOCK"], first_blocks(constants)
    most = min(columns // block, MAX_PLANES * constants["BITS"] // 16)
    for count in range(max(most, least), least, -1):
        if count % least == 0 and part_size % (count * block) == 0:
            return count
    return least


def packed_tiles(
    num_tokens: int, num_rows: int, gated: bool, constants: dict, device: torch.device
) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, warps, stages, columns of a step), tuned on an H200.

    On GPUs with little shared memory fewer steps of many rows are loaded ahead. num_rows: of the weight.
    """
    bits = constants["BITS"]
    if num_tokens <= 8:
        if not gated:
            return 8, 16, 1, 4, 256
        if bits == 8 and first_blocks(constants) * constants["BLOCK"] <= 128:
            return 8, 32, 2, 4, 128
        return (8, 64, 4, 3, 256) if bits == 4 and num_rows >= LARGE_OUTPUT else (8, 32, 2, 3, 256)
    if num_tokens <= 16:
        return (16, 64, 4, 3, 256) if gated else (16, 32, 2, 3, 256)
    if num_tokens <= 32:
        return 32, 64, 4, 3, 256
    has_much = _shared_memory(device) >= LARGE_SHARED_MEMORY
    if gated and has_much and num_tokens > 256:
        return (128, 128, 8, 3, 128) if bits == 8 else (64, 128, 4, 2, 256)
    if bits == 8:
        return 64, 64, 4, (4 if num_tokens <= 64 and not gated else 3) if has_much else 2, 128
    if gated:
        return 64, 64, 4, 3 if has_much and num_tokens > 64 else 2, 256
    return 64, 64, 4, 3 if has_much and num_tokens <= 128 else 2, 256


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the most bytes that a program may have; 0: there is no GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
