"""Products of rows with the weights of their experts, grouped by expert: one kernel at every number of rows.

A program takes a tile of one expert's rows and a tile of its weight, and all columns: K ascends in one float32
accumulator, as in `kernels.linear`, so that a row's bits depend on its expert's weight and on the row alone. The weight
is the left operand, wide or expanded from packed codes in the kernel. A table on the device says where an expert's
bytes lie: the host is asked nothing, and the grid is large enough for any choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.experts import reference
from nanoinfer.kernels.experts.add import add_experts
from nanoinfer.kernels.experts.pairs import Pairs, pairs_of
from nanoinfer.kernels.experts.routing import NAMES, ExpertWeight, ExpertWeights, GatedActivation, slice_width
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import ACTIVATIONS, act_and_mul, activate, clamped
from nanoinfer.kernels.layer.rms_norm import rounded
from nanoinfer.kernels.linear.expand import expanded_plane, scales_of_rows
from nanoinfer.kernels.linear.forms import COLUMN, first_blocks, form_of
from nanoinfer.kernels.linear.packed import expanded_block, waited_for
from nanoinfer.kernels.linear.tiles import biased, columns_of
from nanoinfer.kernels.linear.wide_products import high_words, scales_of_block, with_high_bits

RESERVED_BYTES = 8 * 1024
"""Of a program's shared memory, for what is not loaded ahead."""
MOST_TILES = 65_535
"""The second size of a grid; float32 rows of one expert, 16 in a tile, reach it at some 131,000 tokens a step."""


class TensorOffsets(NamedTuple):
    """Where the tensors of a weight lie: bytes of a run, and the first byte of each in it; see `ExpertWeight`."""

    stride: int
    codes: int
    scales: int
    zeros: int
    global_scale: int
    group_index: int
    high_bits: int
    factors: int
    bias: int


@triton.jit
def tensor_of(pool, index, offset: tl.constexpr, stride: tl.constexpr):
    """Return a pointer to the values that lie `offset` bytes behind the begin of a run."""
    size: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth // 8
    return pool + (index * (stride // size) + offset // size)


@triton.jit
def added(weight, value, acc, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """Add the product with weights that lie in registers; see `waited_for`, which the interpreter does not know."""
    acc = tl.dot(weight, value, acc, input_precision=PRECISION)
    if FORM.expansion != -2:
        acc = waited_for(acc)
    return acc


@triton.jit(do_not_specialize=["first_row", "num_pairs"])
def expert_product_kernel(
    x,  # [N, SIZE]; row order[i] // CHOSEN with GATHER, else i
    out,  # [num_pairs, width], rows out_stride apart; row order[i] with SCATTER, else i
    ids,  # [num_pairs], read without `order`; None: all pairs are of expert 0
    table,  # [EXPERTS]: an expert's index in the pool, -1: it is not here
    order,  # [num_pairs]: what `sort_pairs` returns; None: each pair is a tile
    tiles,  # [num_tiles, 4]
    words, scales, zeros, global_scale, group_index, high_bits, factors, bias,  # the pool in each tensor's dtype
    x_rows,  # x as a descriptor of boxes of BLOCK_M rows and a step's columns; None: x is loaded by rows
    num_pairs,
    first_row,  # of the weight, that column 0 of `out` belongs to
    width,  # columns of `out`
    out_stride,
    out_part,  # elements from one part of a sum to the next
    FORM: tl.constexpr,  # None: the weight is wide
    OFFSETS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # of the weight, gate and up counted together
    CHOSEN: tl.constexpr,
    CUT: tl.constexpr,  # columns of part 0 of a sum; SIZE: it is whole
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # None: no clamp
    ALPHA: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks of one step
    WHOLE: tl.constexpr,  # whether a block is one operand
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of one step, of a wide weight
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    wait_for_inputs(PDL)
    if ids is None:
        run_index = tl.load(table).to(tl.int64)
        first_position = tile * BLOCK_M
        end = num_pairs
    elif order is None:
        expert = tl.load(ids + tile)
        if expert < 0:
            return
        run_index = tl.load(table + expert).to(tl.int64)
        first_position = tile
        end = tile + 1
    else:
        run_index = tl.load(tiles + tile * 4).to(tl.int64)
        first_position = tl.load(tiles + tile * 4 + 1)
        end = tl.load(tiles + tile * 4 + 2)
    if run_index < 0:
        return
    words_at = tensor_of(words, run_index, OFFSETS.codes, OFFSETS.stride)
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    OUT_ROWS: tl.constexpr = NUM_ROWS // 2 if GATED else NUM_ROWS
    column_of_out = tl.program_id(0) * OUT_N
    in_rows = tl.arange(0, BLOCK_N)
    # Rows beyond the last are computed as the last, and not stored.
    row = tl.minimum(first_row + column_of_out + in_rows % OUT_N, OUT_ROWS - 1)
    if GATED:
        row += in_rows // OUT_N * OUT_ROWS
    begin_column, end_column = columns_of(tl.program_id(2), SIZE, CUT)
    # Where the compiler knows how many rounds there are, the loop takes longer on an H200 (triton 3.6).
    end_column = tl.minimum(end_column, SIZE)
    if FORM is None:
        at = tl.arange(0, BLOCK_K)
        EVEN: tl.constexpr = CUT % BLOCK_K == 0 and SIZE % BLOCK_K == 0
        weight_at = words_at + row[:, None] * SIZE + at[None, :]
    else:
        BLOCK: tl.constexpr = FORM.block
        PLANE: tl.constexpr = FORM.plane
        PLANES: tl.constexpr = FORM.planes
        EVEN: tl.constexpr = CUT % (UNROLL * BLOCK) == 0 and SIZE % (UNROLL * BLOCK) == 0
        ALIGNED: tl.constexpr = (UNROLL * BLOCK) % FORM.group == 0
        SHARED: tl.constexpr = UNROLL % FORM.blocks_of_word == 0  # high bits are loaded once for blocks that share them
        scales_at = tensor_of(scales, run_index, OFFSETS.scales, OFFSETS.stride)
        zeros_at = zeros
        if zeros is not None:
            zeros_at = tensor_of(zeros, run_index, OFFSETS.zeros, OFFSETS.stride)
        global_at = global_scale
        if global_scale is not None:
            global_at = tensor_of(global_scale, run_index, OFFSETS.global_scale, OFFSETS.stride)
        index_at = group_index
        if group_index is not None:
            index_at = tensor_of(group_index, run_index, OFFSETS.group_index, OFFSETS.stride)
        high_bits_at = high_bits
        if high_bits is not None:
            high_bits_at = tensor_of(high_bits, run_index, OFFSETS.high_bits, OFFSETS.stride)
        factors_at = factors
        if factors is not None:
            factors_at = tensor_of(factors, run_index, OFFSETS.factors, OFFSETS.stride)
        of_row = scales_of_rows(scales_at, zeros_at, global_at, row, FORM)
        word_tile = words_at + row[:, None] * PLANE + tl.arange(0, PLANE)[None, :]
        # A part may begin within a step, whose other columns are 0.
        first_step = begin_column // (UNROLL * BLOCK) * (UNROLL * BLOCK)
    position = first_position + tl.arange(0, BLOCK_M)
    live = position < end
    pair = position
    if order is not None:
        pair = tl.load(order + position, mask=live, other=0)
    x_row = pair // CHOSEN if GATHER else position
    x_row = tl.where(live, x_row, 0)
    x_at = x + x_row.to(tl.int64)[None, :] * SIZE
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORM is None:
        for start in tl.range(begin_column, end_column, BLOCK_K, num_stages=STAGES):
            if EVEN:
                if x_rows is not None:
                    value = x_rows.load([first_position, start]).T
                else:
                    value = tl.load(x_at + (start + at)[:, None], mask=live[None, :], other=0.0)
                weight = tl.load(weight_at + start)
            else:
                in_part = start + at < end_column
                value = tl.load(x_at + (start + at)[:, None], mask=live[None, :] & in_part[:, None], other=0.0)
                weight = tl.load(weight_at + start, mask=in_part[None, :], other=0.0)
            acc = tl.dot(weight, value, acc, input_precision=PRECISION)
    else:
        for start in tl.range(first_step, end_column, UNROLL * BLOCK, num_stages=STAGES):
            first = start // BLOCK
            for u in tl.static_range(UNROLL):
                block = first + u
                if not EVEN:
                    block = tl.minimum(block, (SIZE - 1) // BLOCK)
                words_tile = tl.load(word_tile + block * NUM_ROWS * PLANE)
                if not SHARED or u % FORM.blocks_of_word == 0:
                    high = high_words(high_bits_at, block, row, NUM_ROWS, FORM)
                if SHARED:
                    words_tile = with_high_bits(words_tile, high, u % FORM.blocks_of_word, FORM)
                else:
                    words_tile = with_high_bits(words_tile, high, block % FORM.blocks_of_word, FORM)
                held = scales_of_block(scales_at, factors_at, of_row, row, NUM_ROWS, block, FORM)
                if WHOLE:
                    at = start + u * BLOCK + tl.arange(0, BLOCK)
                    if x_rows is not None:
                        value = x_rows.load([first_position, start + u * BLOCK]).T
                    else:
                        value = tl.load(x_at + at[:, None], mask=live[None, :], other=0.0)
                    weight = expanded_block(
                        words_tile, scales_at, zeros_at, global_at, index_at, held, row, NUM_ROWS, first, u, x,
                        FORM, ALIGNED, EVEN,
                    )  # fmt: skip
                    acc = added(weight, value, acc, FORM, PRECISION)
                else:
                    for p in tl.static_range(PLANES):
                        at = start + u * BLOCK + p * PLANE + tl.arange(0, PLANE)
                        weight = expanded_plane(
                            words_tile, scales_at, zeros_at, global_at, index_at, held, row, NUM_ROWS, first,
                            u * BLOCK + p * PLANE, x, p, FORM, ALIGNED, EVEN,
                        )  # fmt: skip
                        if EVEN:
                            value = tl.load(x_at + at[:, None], mask=live[None, :], other=0.0)
                        else:  # what lies beyond may be infinite, and its product with 0 no number
                            in_part = (at >= begin_column) & (at < end_column)
                            value = tl.load(x_at + at[:, None], mask=live[None, :] & in_part[:, None], other=0.0)
                            weight = tl.where(in_part[None, :], weight, 0.0)
                        acc = added(weight, value, acc, FORM, PRECISION)
    let_next_in(PDL)
    result = tl.trans(acc)
    up = result
    if GATED:
        result, up = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, OUT_N]), (0, 2, 1)))
    out_column = column_of_out + tl.arange(0, OUT_N)
    inside = (out_column < width) & (first_row + out_column < OUT_ROWS)
    if bias is not None:
        bias_at = tensor_of(bias, run_index, OFFSETS.bias, OFFSETS.stride) + first_row + out_column
        result = biased(result, bias_at, inside)
        if GATED:
            up = biased(up, bias_at + OUT_ROWS, inside)
    if GATED:
        if LIMIT is None:
            result = rounded(activate(rounded(result, x), GELU), x) * rounded(up, x)
        else:
            result = clamped(rounded(result, x), rounded(up, x), LIMIT, ALPHA)
    out_row = pair if SCATTER else position
    target = out + tl.program_id(2) * out_part + out_row.to(tl.int64)[:, None] * out_stride + out_column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    table: Tensor,
    experts: ExpertWeights,
    activation: GatedActivation,
    first_half: int,
    shared: Tensor | None = None,
    experts_read: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Run each row through its experts, and add what they give in two sums: [2, N, hidden_size] float32.

    Args:
        x: [N, hidden_size], packed.
        ids, weights: of `choose_experts`.
        table: [num_experts] int32, the index of each expert's run in the pool; -1: it is not here, and adds nothing.
        first_half: experts below this number belong to the first sum.
        shared: [2, N, hidden_size] float32, added to the two sums last.
        experts_read: [1] int64, to which the number of experts is added that some row takes, and that are here.
        shared_gate: [N, 1]: `shared` is multiplied by its sigmoid, rounded, before it is added.
    """
    (num_rows, hidden_size), num_pairs = x.shape, ids.numel()
    out = torch.empty(2, num_rows, hidden_size, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out
    pairs = pairs_of(x, ids, table, experts, experts_read)
    hidden = _hidden(x, pairs, experts.gate_up, activation)
    width = slice_width(num_pairs, hidden_size)
    products = torch.empty(num_pairs * width, dtype=torch.float32, device=x.device)
    for begin in range(0, hidden_size, width):
        count = min(width, hidden_size - begin)
        some = products[: num_pairs * count].view(num_pairs, count)
        _launch(hidden, some, pairs, experts.down, first_row=begin, scatters=True)
        is_counted = pairs.order is None and begin == 0
        counted = experts_read if is_counted else None
        add_experts(some, ids, weights, table, shared, shared_gate, out, begin, first_half, counted)
    return out


def shared_mlp(
    x: Tensor, table: Tensor, experts: ExpertWeights, activation: GatedActivation, cut: int | None
) -> Tensor:
    """Run all rows through one expert. Of its last sum the columns before `cut` are one part, the others another.

    cut: None: all are the first part, and the second is 0.

    Returns [2, N, hidden_size] float32.
    """
    down, make = experts.down, torch.empty if cut is not None else torch.zeros
    out = make(2, len(x), down.num_rows, dtype=torch.float32, device=x.device)
    if len(x):
        pairs = pairs_of(x, None, table, experts)
        hidden, target = _hidden(x, pairs, experts.gate_up, activation), out if cut is not None else out[0]
        _launch(hidden, target, pairs, down, scatters=True, cut=cut)
    return out


def _hidden(x: Tensor, pairs: Pairs, gate_up: tuple[ExpertWeight, ...], activation: GatedActivation) -> Tensor:
    """Compute what goes into the experts' last product, in the order of the sorted pairs: [num_pairs, size]."""
    num_pairs, num_rows = pairs.count, sum(weight.num_rows for weight in gate_up)
    has_kernel = activation.limit is not None or activation.name in ACTIVATIONS
    if len(gate_up) == 1 and has_kernel:
        hidden = torch.empty(num_pairs, num_rows // 2, dtype=x.dtype, device=x.device)
        _launch(x, hidden, pairs, gate_up[0], activation, gathers=True)
        return hidden
    both = torch.empty(num_pairs, num_rows, dtype=x.dtype, device=x.device)
    for weight, out in zip(gate_up, both.chunk(len(gate_up), dim=1), strict=True):
        _launch(x, out, pairs, weight, gathers=True)
    if has_kernel:
        return act_and_mul(both, activation.name, activation.limit, activation.alpha, fuses=False)
    return reference.gated(*both.chunk(2, dim=1), activation)


def _launch(
    x: Tensor, out: Tensor, pairs: Pairs, weight: ExpertWeight, activation: GatedActivation | None = None, *,
    gathers: bool = False, scatters: bool = False, first_row: int = 0, cut: int | None = None,
) -> None:  # fmt: skip
    width, size, tiles = out.shape[-1], weight.in_features, pairs.sizes
    assert x.is_contiguous() and out.stride(-1) == 1 and x.shape[1] == size, "rows must be packed"
    num_tiles = pairs.count if pairs.tiles is None else len(pairs.tiles)
    if pairs.ids is None:
        num_tiles = triton.cdiv(pairs.count, tiles.block_m)
        assert num_tiles <= MOST_TILES, "the tiles of a launch are counted from 0"
    cut, num_parts = (size, 1) if cut is None else (cut, 2)
    form, unroll, stages = None, 1, tiles.stages
    if weight.packed is not None:
        form = form_of(weight.packed, x.device, x.dtype)
        unroll = _blocks_of_step(form, tiles.columns)
        stages = 1 if form.mode == COLUMN.value else stages
    target, gated = target_of(x.device), activation is not None
    step, bits = (tiles.columns, 16) if form is None else (unroll * form.block, form.bits)
    step_bytes = step * (tiles.block_m * x.element_size() + tiles.block_n * bits // 8)
    stages = max(1, min(stages, (target.program_memory - RESERVED_BYTES) // step_bytes))
    is_whole = form is not None and cut == size and size % (unroll * form.block) == 0 and form.mode != COLUMN.value
    # Other matrix units, and Hopper's for smaller tiles, take the columns of a longer operand in another order.
    is_whole = (
        is_whole and target.has_async_products and tiles.block_m >= 16 and tiles.block_n >= 64 and form.planes < 8
    )
    x_rows = None
    if target.has_async_products and not gathers and tiles.block_m >= 64 and cut == size and size % step == 0:
        if form is None or is_whole:  # the copy unit loads rows that lie together
            columns = tiles.columns if form is None else form.block
            x_rows = TensorDescriptor(x, list(x.shape), [size, 1], [tiles.block_m, columns])
    columns = triton.cdiv(width, tiles.block_n // (2 if gated else 1))
    for first in range(0, num_tiles, MOST_TILES):
        some = None if pairs.tiles is None else pairs.tiles[first : first + MOST_TILES]
        expert_product_kernel[(columns, min(MOST_TILES, num_tiles - first), num_parts)](
            x, out, *pairs[:3], some, *(weight.tensors.get(name) for name in NAMES), x_rows, pairs.count, first_row,
            width, out.stride(-2), out.stride(0) if out.dim() == 3 else 0, FORM=form,
            OFFSETS=TensorOffsets(weight.stride, *(weight.offsets.get(name, 0) for name in NAMES)), SIZE=size,
            NUM_ROWS=weight.num_rows, CHOSEN=1 if pairs.ids is None else pairs.ids.shape[1], CUT=cut, GATHER=gathers,
            SCATTER=scatters, GATED=gated, GELU=gated and activation.name != "silu",
            LIMIT=activation.limit if gated else None, ALPHA=activation.alpha if gated else 1.0, UNROLL=unroll,
            WHOLE=is_whole, PRECISION="ieee" if x.dtype == torch.float32 else target.precision, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, BLOCK_K=tiles.columns, STAGES=stages, num_warps=tiles.num_warps,
            **launch_options(x, fuses=False),
        )  # fmt: skip


def _blocks_of_step(form, columns: int) -> int:
    """Return how many blocks make up about so many columns: if possible, so many that the weight is whole steps."""
    least = first_blocks(form)
    if form.size % (form.blocks_of_word * form.block) == 0:  # of blocks that share words, all
        least = max(least, form.blocks_of_word)
    most = max(least, columns // form.block // least * least)
    whole = (count for count in range(most, 0, -least) if form.size % (count * form.block) == 0)
    return next(whole, most)
