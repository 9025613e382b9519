"""Matrix products whose bits depend on the weight and a row of x, not on the number of rows.

Every product is summed in one order: K ascending, in one float32 accumulator of the matrix units, rounded once. Tile
sizes, the number of rows and a row's place do not change that order. So these give the same bits:

- `rows_linear_kernel`, for few rows: bound by the bytes of the weight, so each program streams a few of its rows,
  several loads ahead.
- `tile_linear_kernel`, for more rows: tiled over the rows of x and of the weight.
- The library, for many rows, wherever it keeps the order. It is called only at `library_counts` rows, and each of these
  counts was compared with our own order when the engine started (`nanoinfer.execution.products`).

Sums that are added to the residual have two parts, cut at a column that follows from the weight alone (`cuts`).

Rounding follows `nanoinfer.layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.launch.pdl import ask_for, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import ACTIVATIONS, act_and_mul
from nanoinfer.kernels.linear.counts import MAX_ROWS, padded_rows
from nanoinfer.kernels.linear.launches import LARGE_OUTPUT, LARGE_SHARED_MEMORY, arguments, part_sizes, tiles_of
from nanoinfer.kernels.linear.tiles import finished_part, finished_product, tile_linear_kernel

FEW_ROWS = 16
FEW_GATED_ROWS = 32
"""Up to this many rows (`FEW_ROWS` without a gate) `rows_linear_kernel` is faster than `tile_linear_kernel`."""
FLOAT32_ROWS = 128
"""float32 has no matrix units, so the library computes it, always with this many rows at a time."""


@triton.jit(do_not_specialize=["num_tokens"])
def rows_linear_kernel(
    x,  # [num_tokens, SIZE]
    weight,  # [GATED ? 2 * num_rows : num_rows, SIZE], gate first
    bias,  # one value per row of weight, read with BIAS
    out,  # [num_tokens, num_rows], or [2, num_tokens, num_rows] float32 where CUT < SIZE
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    CUT: tl.constexpr,  # columns of part 0 of a sum; SIZE: it is whole
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_N divides num_rows
    EVEN_SIZE: tl.constexpr,  # BLOCK_K divides the columns of each part
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of a row that are asked for before the wait
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    token = tl.arange(0, BLOCK_M)
    live = token < num_tokens
    part = tl.program_id(1)
    column = part * CUT + tl.arange(0, BLOCK_K)
    if SIZE == CUT or SIZE == 2 * CUT:
        part_size: tl.constexpr = CUT
    else:
        part_size = tl.where(part == 0, CUT, SIZE - CUT)
    if PDL and AHEAD > 0:
        asked = tl.minimum(row, num_rows - 1)[:, None]
        in_row = part * CUT + tl.arange(0, AHEAD)[None, :] * 64
        ask_for(weight + asked.to(tl.int64) * SIZE + in_row)
        if GATED:
            ask_for(weight + (asked + num_rows).to(tl.int64) * SIZE + in_row)
    wait_for_inputs(PDL)
    x_tile = x + token[None, :] * SIZE + column[:, None]
    first = weight + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    second = weight + (row + num_rows).to(tl.int64)[:, None] * SIZE + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, part_size, BLOCK_K, num_stages=STAGES):
        in_size = start + tl.arange(0, BLOCK_K) < part_size
        live_tile = live[None, :] if EVEN_SIZE else live[None, :] & in_size[:, None]
        value = tl.load(x_tile + start, mask=live_tile, other=0.0)
        if EVEN and EVEN_SIZE:
            acc = tl.dot(tl.load(first + start), value, acc, input_precision=PRECISION)
            if GATED:
                up = tl.dot(tl.load(second + start), value, up, input_precision=PRECISION)
        else:
            listed = inside[:, None] & in_size[None, :]
            acc = tl.dot(tl.load(first + start, mask=listed, other=0.0), value, acc, input_precision=PRECISION)
            if GATED:
                tile = tl.load(second + start, mask=listed, other=0.0)
                up = tl.dot(tile, value, up, input_precision=PRECISION)
    let_next_in(PDL)
    result = tl.trans(acc)
    if CUT == SIZE:
        result = finished_product(result, tl.trans(up), bias, row, inside, num_rows, out, BIAS, GATED, GELU)
    else:
        result = finished_part(result, bias, row, inside, part, BIAS)
    target = (part * num_tokens + token[:, None]) * num_rows + row[None, :]
    stored = live[:, None] & inside[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stored)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    row_sizes: Sequence[int] = (),
    activation: str | None = None,
    out: Tensor | None = None,
    library_counts: Collection[int] = (),
) -> Tensor:
    """x @ weight.T + bias, or activation(gate) * up of such a product.

    Args:
        x: [N, size], packed rows.
        weight: [num_rows, size], with an activation [2 * num_rows, size], gate first.
        bias: a value per row of weight.
        row_sizes: in float32, where the library chooses the order of sums by the shape, so many neighbouring rows of
            the weight are a product of their own each; (): all are one. Our kernels sum in one order.
        activation: one of `ACTIVATIONS`; not in float32.
        out: [N, num_rows], for the result.
        library_counts: numbers of rows, as `padded_rows` gives them, at which the library keeps the order of sums.

    Returns:
        [N, num_rows].
    """
    _check(x, weight)
    assert activation is None or activation in ACTIVATIONS, f"no kernel for {activation!r}"
    num_tokens, num_rows = len(x), len(weight) // (1 if activation is None else 2)
    if x.element_size() == 4 and target_of(x.device).is_compiled:
        assert activation is None, "float32 goes through the library"
        out = x.new_empty(num_tokens, num_rows) if out is None else out
        return _float32_linear(x, weight, bias, out, row_sizes or (num_rows,))
    if num_tokens > MAX_ROWS and (count := padded_rows(num_tokens)) in library_counts:
        product = F.linear(padded(x, count), weight, bias)[:num_tokens]
        if activation is not None:
            product = act_and_mul(product, activation)
        return product if out is None else out.copy_(product)
    return _product(x, weight, bias, activation, x.new_empty(num_tokens, num_rows) if out is None else out)


def linear_parts(
    x: Tensor, weight: Tensor, cut: int, bias: Tensor | None = None, *, library_counts: Collection[int] = ()
) -> Tensor:
    """Compute x @ weight.T + bias as parts of a sum, which `rms_norm` adds up: [n, N, num_rows] float32.

    n is 2, or 1 if the parts are added up already. Part 0 is the sum over the columns before `cut`, and has the bias.
    """
    _check(x, weight)
    num_tokens, num_rows = len(x), len(weight)
    assert 0 < cut < x.shape[1], f"{x.shape[1]} columns are cut at {cut}"
    if x.element_size() == 4 and target_of(x.device).is_compiled:
        first, second = (
            _float32_linear(x[:, some], weight[:, some], None, x.new_empty(num_tokens, num_rows), (num_rows,))
            for some in (slice(cut), slice(cut, None))
        )
        if bias is not None:
            first += bias
        return first.add_(second)[None]
    if num_tokens > MAX_ROWS and (count := padded_rows(num_tokens)) in library_counts:
        return library_sum(padded(x, count), weight, cut, bias)[None, :num_tokens]
    out = torch.empty(2, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    return _product(x, weight, bias, None, out, cut)


def wide_linear(x: Tensor, weight: Tensor, *, library_counts: Collection[int] = ()) -> Tensor:
    """x @ weight.T, not rounded: [N, num_rows] float32. library_counts: as of `linear`."""
    if x.element_size() == 4:
        return linear(x, weight)
    _check(x, weight)
    if len(x) > MAX_ROWS and (count := padded_rows(len(x))) in library_counts:
        return torch.mm(padded(x, count), weight.t(), out_dtype=torch.float32)[: len(x)]
    return _product(x, weight, None, None, torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device))


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, out: Tensor, cut: int | None = None
) -> Tensor:
    """Compute `linear` or `linear_parts` with our kernels; out: shape and dtype of their result."""
    (num_tokens, size), num_rows, gated = x.shape, out.shape[-1], activation is not None
    least_part = min(part_sizes(size, cut))
    assert out.is_contiguous(), "rows must be packed"
    if num_tokens == 0:
        return out
    few = num_tokens <= (FEW_GATED_ROWS if gated else FEW_ROWS)
    # Of the GPUs with a copy unit (the tensor memory accelerator) only those with 227 KiB of shared memory use it: its
    # larger tiles need as much. Rows must begin at multiples of 16 bytes.
    target = target_of(x.device)
    is_large = target.copies_tiles and target.program_memory >= LARGE_SHARED_MEMORY
    # A part must end where a tile does, or where the row does: beyond its end the unit gives zeros.
    tma = not few and is_large and size * x.element_size() % 16 == 0 and (cut or 0) % 64 == 0
    tiles = tiles_of("few rows" if few else "copied" if tma else "loaded", x, out, gated, cut)
    if tma and (cut or 0) % tiles.columns:
        tiles = tiles._replace(columns=64, stages=tiles.stages * tiles.columns // 64)
    launch = arguments(x, bias, activation, out, cut, tiles)
    launch |= dict(SIZE=size, PRECISION="ieee" if x.dtype == torch.float32 else target.precision, BLOCK_K=tiles.columns)
    grid = triton.cdiv(num_tokens, tiles.block_m), triton.cdiv(num_rows, tiles.block_n), 1 if cut is None else 2
    if few:
        # On an H200, products of 9 to 16 rows without a gate take 4% longer if they ask ahead, all others up to 5%
        # less.
        asks = (num_tokens <= 8 or gated) and least_part >= 128 and num_rows <= LARGE_OUTPUT
        is_even = all(one % tiles.columns == 0 for one in part_sizes(size, cut))
        even = dict(EVEN=num_rows % tiles.block_n == 0, EVEN_SIZE=is_even)
        rows_linear_kernel[grid[1:]](x, weight, AHEAD=2 if asks else 0, **even, **launch)
        return out
    x_rows = weight_rows = None
    if tma:
        x_rows = TensorDescriptor(x, [num_tokens, size], [size, 1], [tiles.block_m, tiles.columns])
        weight_rows = TensorDescriptor(weight, list(weight.shape), [size, 1], [tiles.block_n, tiles.columns])
    tile_linear_kernel[grid](x, weight, x_rows, weight_rows, TMA=tma, **launch)
    return out


def library_sum(x: Tensor, weight: Tensor, cut: int, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_parts` with the library, added up: [N, num_rows] float32."""
    rows = weight.t()
    if bias is None:
        total = torch.mm(x[:, :cut], rows[:cut], out_dtype=torch.float32)
    else:
        total = bias.float().repeat(len(x), 1)
        torch.addmm(total, x[:, :cut], rows[:cut], out_dtype=torch.float32, out=total)
    torch.addmm(total, x[:, cut:], rows[cut:], out_dtype=torch.float32, out=total)
    return total


def padded(x: Tensor, count: int) -> Tensor:
    """Return x padded to `count` rows. The padding is uninitialised and reaches no result."""
    if len(x) == count:
        return x
    result = x.new_empty(count, *x.shape[1:])
    result[: len(x)] = x
    return result


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.shape[1] == weight.shape[1], f"{x.shape[1]} columns instead of {weight.shape[1]}"
    assert x.is_contiguous() and weight.is_contiguous(), "rows must be packed"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "another alignment would be another binary"


def _float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, row_sizes: Sequence[int]) -> Tensor:
    biases = [None] * len(row_sizes) if bias is None else bias.split(row_sizes)
    weights = list(zip(weight.split(row_sizes), biases, out.split(row_sizes, 1), strict=True))
    for begin in range(0, len(x), FLOAT32_ROWS):
        part = x[begin : begin + FLOAT32_ROWS]
        rows = padded(part, FLOAT32_ROWS).contiguous()
        for some, bias, target in weights:
            target[begin : begin + len(part)] = F.linear(rows, some, bias)[: len(part)]
    return out
