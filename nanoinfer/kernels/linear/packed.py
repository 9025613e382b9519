"""Products of up to `MAX_ROWS` rows with packed weights, expanded inside the kernel.

A program takes some rows of the weight and all columns of a part of the sum, block by block, plane by plane: so K
ascends as in `rows` and `tiles`, and the bits are those of the product with the expanded matrix. The weight is the left
operand: its planes go from registers into the matrix units. On Hopper the planes of a block are one operand, so that
the units wait once for a block, and the copy unit loads x. With a gate, half of a program's rows are gate rows and the
other half the up rows that belong to them, so that both are one product, shared out evenly among the warps.
"""

from __future__ import annotations

from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.launch.pdl import ask_for, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import ACTIVATIONS
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.kernels.linear.expand import beside, expanded_plane, scales_of_rows
from nanoinfer.kernels.linear.forms import COLUMN, SCALE_WORDS, WeightForm, first_blocks, form_of, tensors_of
from nanoinfer.kernels.linear.launches import PROGRAMS, Tiles, arguments, part_sizes, tiles_of
from nanoinfer.kernels.linear.packed_weight import PackedWeight
from nanoinfer.kernels.linear.tiles import columns_of, finished_part, finished_product
from nanoinfer.kernels.linear.wide_products import high_words, scales_of_block, with_high_bits

MAX_PLANES = 8
"""The most planes of one step of the loop."""
HALF_SHARED_MEMORY = 116 * 1024
"""Of programs that take more, a core of a Hopper GPU runs one at a time."""


@triton.jit
def expanded_block(
    words, scales, zeros, global_scale, group_index, of_row, row, num_rows, first, u: tl.constexpr, like,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the weights of a block, [rows, block], in the order of its columns. u: its number after the first one."""
    PLANES: tl.constexpr = FORM.planes
    weight = None
    for p in tl.static_range(0, PLANES, 2):
        pair = None
        for q in tl.static_range(2):
            plane = expanded_plane(
                words, scales, zeros, global_scale, group_index, of_row, row, num_rows, first,
                u * FORM.block + (p + q) * FORM.plane, like, p + q, FORM, ALIGNED, EVEN,
            )  # fmt: skip
            pair = plane if pair is None else beside(pair, plane)
        weight = pair if weight is None else beside(weight, pair)
    return weight


@triton.jit
def waited_for(acc):
    """Return sums when the matrix units are done with them.

    Triton lets the last product of a loop's step run on while the next step writes the registers that hold its left
    operand, and ptxas before 13.3 does not see that (triton-lang/triton#9433). An instruction that takes the sums has
    the product waited for.
    """
    return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["num_tokens"])
def packed_linear_kernel(
    x,  # [num_tokens, SIZE]
    x_rows,  # x as a descriptor of boxes of BLOCK_M x BLOCK; None: the planes are multiplied one by one
    words, scales, zeros, global_scale, group_index, high_bits, factors,  # see `PackedWeight`; GATED: gate, then up
    bias,  # one value per row of weight, read with BIAS
    out,  # [num_tokens, num_rows], or [2, num_tokens, num_rows] float32 where CUT < SIZE
    num_tokens,
    num_rows,
    FORM: tl.constexpr,
    CUT: tl.constexpr,  # columns of part 0 of a sum; SIZE: it is whole
    UNROLL: tl.constexpr,  # blocks of one step
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,  # OUT_N divides num_rows
    EVEN_SIZE: tl.constexpr,  # whole steps of UNROLL blocks make up each part
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks that are asked for before the wait
    PDL: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = FORM.size
    BLOCK: tl.constexpr = FORM.block
    PLANE: tl.constexpr = FORM.plane
    PLANES: tl.constexpr = FORM.planes
    STEP: tl.constexpr = UNROLL * BLOCK
    ALIGNED: tl.constexpr = STEP % FORM.group == 0
    # Whether high bits are loaded once for all blocks that share them.
    SHARED: tl.constexpr = UNROLL % FORM.blocks_of_word == 0
    # Programs that share rows of the weight follow each other, so only one of them reads these rows from memory.
    first_token = tl.program_id(0) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
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
    begin, end = columns_of(tl.program_id(2), SIZE, CUT)
    first_step = begin
    if not EVEN_SIZE:  # a part may begin within a step, whose other columns are 0
        first_step = begin // STEP * STEP
    if PDL and AHEAD > 0:
        ahead = (begin // BLOCK + tl.arange(0, AHEAD)).to(tl.int64)
        ask_for(words + (ahead[None, :] * all_rows + row[:, None]) * PLANE)
    wait_for_inputs(PDL)
    of_row = scales_of_rows(scales, zeros, global_scale, row, FORM)
    x_tile = x + token.to(tl.int64)[None, :] * SIZE + at[:, None]
    word_tile = words + row[:, None] * PLANE + at[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first_step, end, STEP, num_stages=STAGES):
        first = start // BLOCK
        for u in tl.static_range(UNROLL):
            block = first + u
            if not EVEN_SIZE:  # beyond the last, x is 0
                block = tl.minimum(block, (SIZE - 1) // BLOCK)
            tile = tl.load(word_tile + block.to(tl.int64) * all_rows * PLANE)
            if not SHARED or u % FORM.blocks_of_word == 0:
                high = high_words(high_bits, block, row, all_rows, FORM)
            if SHARED:
                tile = with_high_bits(tile, high, u % FORM.blocks_of_word, FORM)
            else:
                tile = with_high_bits(tile, high, block % FORM.blocks_of_word, FORM)
            held = scales_of_block(scales, factors, of_row, row, all_rows, block, FORM)
            if x_rows is not None:
                weight = expanded_block(
                    tile, scales, zeros, global_scale, group_index, held, row, all_rows, first, u, x, FORM, ALIGNED,
                    EVEN_SIZE,
                )  # fmt: skip
                value = x_rows.load([first_token, start + u * BLOCK]).T
                acc = waited_for(tl.dot(weight, value, acc, input_precision="ieee"))
            else:
                for p in tl.static_range(PLANES):
                    column = start + u * BLOCK + p * PLANE
                    if EVEN_SIZE:
                        value = tl.load(x_tile + column, mask=live[None, :], other=0.0)
                    else:
                        in_part = column + at < end
                        if CUT < SIZE:
                            in_part &= column + at >= begin
                        value = tl.load(x_tile + column, mask=live[None, :] & in_part[:, None], other=0.0)
                    weight = expanded_plane(
                        tile, scales, zeros, global_scale, group_index, held, row, all_rows, first,
                        u * BLOCK + p * PLANE, x, p, FORM, ALIGNED, EVEN_SIZE,
                    )  # fmt: skip
                    if not EVEN_SIZE:  # what lies beyond may be infinite, and its product with 0 no number
                        weight = tl.where(in_part[None, :], weight, 0.0)
                    acc = tl.dot(weight, value, acc, input_precision="ieee")
    let_next_in(PDL)
    result = tl.trans(acc)
    up = result
    if GATED:
        result, up = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, OUT_N]), (0, 2, 1)))
    out_row = first_row + tl.arange(0, OUT_N)
    inside = out_row < num_rows
    if CUT == SIZE:
        result = finished_product(result, up, bias, out_row, inside, num_rows, out, BIAS, GATED, GELU)
    else:
        result = finished_part(result, bias, out_row, inside, tl.program_id(2), BIAS)
    target = (tl.program_id(2) * num_tokens + token).to(tl.int64)[:, None] * num_rows + out_row[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    in_parts: bool = False,
) -> Tensor | None:
    """Compute `rows.linear`, or `rows.linear_parts` at the weight's own cut, with the matrix that a weight stands for.

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
        if in_parts:
            shape, dtype = (2, *shape), torch.float32
        out = torch.empty(shape, dtype=dtype, device=x.device)
    assert out.is_contiguous(), "rows must be packed"
    if num_tokens == 0:
        return out
    cut = weight.cut if in_parts else None
    form, sizes, target = form_of(weight, x.device, x.dtype), part_sizes(size, cut), target_of(x.device)
    least_step = first_blocks(form) * form.block
    tiles = tiles_of("8 bits" if form.bits == 8 else "4 bits", x, out, gated, cut, least_step=least_step)
    most_planes = MAX_PLANES
    if form.mode == SCALE_WORDS.value and num_tokens <= 8:
        tiles, most_planes = tiles_of_scale_words(tiles, form, weight.num_rows, len(sizes), gated)
    unroll = blocks_of_step(gcd(*sizes), tiles.columns, form, most_planes)
    step, stages = unroll * form.block, tiles.stages
    if step > tiles.columns:  # as many columns are loaded ahead, in fewer steps
        stages = max(2, stages * tiles.columns // step)
    x_rows, is_even = None, gcd(*sizes) % step == 0
    if form.mode == COLUMN.value:  # a tile of scales for each plane would take all shared memory
        stages = 1
    elif target.has_async_products and is_even and tiles.block_m >= 16 and tiles.block_n >= 64 and form.planes < 8:
        x_rows = TensorDescriptor(x, [num_tokens, size], [size, 1], [tiles.block_m, form.block])
    grid = (triton.cdiv(num_tokens, tiles.block_m), triton.cdiv(weight.num_rows, tiles.block_n), len(sizes))
    word_bytes = 2 * unroll * form.plane * tiles.block_n
    if form.high_bits:
        word_bytes += word_bytes // (form.blocks_of_word if unroll % form.blocks_of_word == 0 else 1)
    step_bytes = step * 2 * tiles.block_m + word_bytes
    if x_rows is not None and prod(grid) <= PROGRAMS:  # else some cores would have two programs and others none
        stages = max(stages, 1 + (HALF_SHARED_MEMORY + word_bytes) // step_bytes)
    if form.mode == SCALE_WORDS.value:
        words_of_block = max(1, form.block // (form.group * form.groups_of_word)) + (1 if form.factor else 0)
        scale_bytes = 4 * step // form.block * words_of_block * tiles.block_n
    else:  # small groups with wide scales and zeros take as much as a tenth of a step
        num_scales = step // form.group * tiles.block_n
        scale_bytes = num_scales * min(4, weight.scales.element_size()) * (2 if form.has_zeros else 1)
    if x_rows is not None or form.mode == SCALE_WORDS.value:  # whose steps are longer where blocks share words
        stages = max(1, min(stages, (target.program_memory - 1024) // (step_bytes + scale_bytes)))
    packed_linear_kernel[grid](
        x, x_rows, *tensors_of(weight), FORM=form, UNROLL=unroll, EVEN=weight.num_rows % tiles.block_n == 0,
        EVEN_SIZE=is_even, AHEAD=2 if num_tokens <= 8 and min(sizes) >= 2 * form.block else 0,
        **arguments(x, bias, activation, out, cut, tiles) | dict(STAGES=stages),
    )  # fmt: skip
    return out


def tiles_of_scale_words(
    tiles: Tiles, form: WeightForm, num_rows: int, num_parts: int, gated: bool
) -> tuple[Tiles, int]:
    """Return the tiles of up to 8 rows of x with products in float32, and the most planes of a step.

    Larger tiles take longer: their scales are computed. Where all programs run at a time, two on a core, more of them
    with half of the rows keep more bytes in flight; of 6 bits in longer steps, which share their scales.
    """
    is_small = not gated and triton.cdiv(num_rows, 32) * num_parts <= 2 * PROGRAMS
    if is_small and form.bits == 4:
        return tiles._replace(block_n=16, num_warps=1, columns=128, stages=6), MAX_PLANES
    if is_small and form.bits == 6:
        return tiles._replace(block_n=16, num_warps=1, columns=256, stages=4), 2 * MAX_PLANES
    return tiles._replace(block_n=32, num_warps=2), MAX_PLANES


def blocks_of_step(part_size: int, columns: int, form: WeightForm, most_planes: int = MAX_PLANES) -> int:
    """Return how many blocks make up about so many columns: as many as divide each part of a sum, if any do.

    part_size: what divides the columns of each part.

    Of narrow planes fewer columns: each plane is code of its own, and many take the compiler tens of seconds.
    """
    block, least = form.block, first_blocks(form)
    most = min(columns // block, most_planes // form.planes)
    if part_size % (form.blocks_of_word * block) == 0:  # of blocks that share words, all
        least = max(least, form.blocks_of_word)
    for count in range(max(most, least), least, -1):
        if count % least == 0 and part_size % (count * block) == 0:
            return count
    return least
