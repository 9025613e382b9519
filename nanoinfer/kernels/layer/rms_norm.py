"""RMS norm of rows, with the residual sum before it: one pass instead of eight small kernels.

One program takes one row, so a row's result depends on nothing else. Rounding follows `nanoinfer.layers`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2


@triton.jit
def rounded(x, like):
    """x as float32, rounded to the dtype of the pointer `like` first."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(
    value, weight, like, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_ONCE: tl.constexpr
):  # fmt: skip
    """Return the norm of a row, in float32, not rounded; see `rms_norm_kernel`. weight: as it is loaded."""
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    if OFFSET:
        value *= 1.0 + weight
    elif ROUNDS_ONCE:
        value *= weight
    else:
        value = rounded(value, like) * weight
    return value


@triton.jit
def addend(
    x, other, row, columns, inside, other_stride, SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr
):  # fmt: skip
    """Load a row of what is added to x as float32: parts of a sum are added in order, and rounded."""
    if NUM_SPLITS > 0:
        added = tl.zeros(columns.shape, tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            part = other + (split * tl.num_programs(0) + row) * SIZE + columns
            added += tl.load(part, mask=inside, other=0.0)
        return rounded(added, x)
    else:
        return tl.load(other + row * other_stride + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def residual_sum(x, value, added, scale, row, columns, inside, x_stride, FACTOR: tl.constexpr):
    """Return (value + FACTOR * added) * scale, each rounded, which becomes the row of x in memory.

    value: that row, float32; scale: a pointer to one number, None: 1.
    """
    if FACTOR is not None:
        added = rounded(added * FACTOR, x)
    value = rounded(value + added, x)
    if scale is not None:
        value = rounded(value * tl.load(scale).to(tl.float32), x)
    tl.store(x + row * x_stride + columns, value.to(x.dtype.element_ty), mask=inside)
    return value


@triton.jit(do_not_specialize_on_alignment=["sum_scale"])
def rms_norm_kernel(
    x,  # [N, SIZE], rows x_stride apart; becomes (x + FACTOR * other) * sum_scale; with FRESH it is not read, but 0
    other,  # [N, SIZE], rows other_stride apart; read with ADD; or [NUM_SPLITS, N, SIZE] float32, whose sum is added
    weight,  # [SIZE]; None: x is only added to
    behind,  # [SIZE], the weight of a norm of `other`, which is added in place of it; None: there is none
    sum_scale,  # [1]; None: 1
    out,  # [N, SIZE]; None without `weight`
    x_stride,
    other_stride,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET: tl.constexpr,  # the factor is 1 + weight, and the product is rounded once
    ROUNDS_ONCE: tl.constexpr,  # the product is rounded once
    ADD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FACTOR: tl.constexpr,  # None: 1
    FRESH: tl.constexpr,
    NORM_FACTOR: tl.constexpr,  # of the norm, once it is rounded; None: 1
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if behind is not None:
        scale_of_other = tl.load(behind + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if FRESH:
        value = tl.zeros([TILE], tl.float32)
    else:
        value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = addend(x, other, row, columns, inside, other_stride, SIZE, NUM_SPLITS)
        if behind is not None:
            added = rounded(normed(added, scale_of_other, x, eps, SIZE, OFFSET, ROUNDS_ONCE), x)
        value = residual_sum(x, value, added, sum_scale, row, columns, inside, x_stride, FACTOR)
    if weight is not None:
        value = normed(value, scale, x, eps, SIZE, OFFSET, ROUNDS_ONCE)
        if NORM_FACTOR is not None:
            value = rounded(value, out) * NORM_FACTOR
        tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: bool,
    rounds_once: bool = False,
    other: Tensor | None = None,
    behind: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
    scale: Tensor | None = None,
    is_fresh: bool = False,
    norm_factor: float | None = None,
) -> Tensor:
    """Return the norm of x, [N, size], in `out` if that is given. With `other`, x becomes x + factor * other first.

    x: [N, size], rows at any stride, changed in place; weight: [size], None: x itself is returned; other: [N, size]
    likewise, all of one dtype; or `other` as the parts of a sum, [splits, N, size] float32, packed, which are added in
    order and rounded. behind: [size], the weight of a norm of `other`, which is added in place of it. offset,
    rounds_once: as in `HeadSteps`. factor: None: 1. scale: [1], by which the sum is multiplied, rounded; None: 1.
    is_fresh: x holds nothing yet and counts as zero. norm_factor: by which the norm is multiplied, rounded; None: 1.
    """
    return launch_norm(
        rms_norm_kernel, x, (weight, behind, scale), eps, other, out, factor, OFFSET=offset, ROUNDS_ONCE=rounds_once,
        FRESH=is_fresh, NORM_FACTOR=norm_factor,
    )  # fmt: skip


@triton.jit
def two_norms_kernel(
    x,  # [N, SIZE], rows x_stride apart
    weight,  # [SIZE]
    other_weight,  # [SIZE]
    out,  # [N, SIZE], the norm with `weight`
    other_out,  # [N, SIZE], that with the other one, times FACTOR
    x_stride,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET: tl.constexpr,  # as of `rms_norm_kernel`, likewise the others
    ROUNDS_ONCE: tl.constexpr,
    OTHER_OFFSET: tl.constexpr,
    OTHER_ROUNDS_ONCE: tl.constexpr,
    FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    other_scale = tl.load(other_weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    one = normed(value, scale, x, eps, SIZE, OFFSET, ROUNDS_ONCE)
    tl.store(out + row * SIZE + columns, one.to(out.dtype.element_ty), mask=inside)
    other = normed(value, other_scale, x, eps, SIZE, OTHER_OFFSET, OTHER_ROUNDS_ONCE)
    other = rounded(other, out) * FACTOR
    tl.store(other_out + row * SIZE + columns, other.to(out.dtype.element_ty), mask=inside)


def two_norms(
    x: Tensor, weights: tuple[Tensor, Tensor], eps: float, rounding: tuple[tuple[bool, bool], ...], norm_factor: float
) -> tuple[Tensor, Tensor]:
    """Return two norms of x, [N, size], the second times `norm_factor`, as `rms_norm` does. rounding: of each `offset`
    and `rounds_once`."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 and x.data_ptr() % 16 == 0, "values of a row must be packed, and tensors aligned"
    outs = tuple(torch.empty((num_rows, size), dtype=x.dtype, device=x.device) for _ in weights)
    (offset, once), (other_offset, other_once) = rounding
    tile = next_power_of_2(size)
    if num_rows:
        two_norms_kernel[(num_rows,)](
            x, *weights, *outs, x.stride(0), eps, SIZE=size, TILE=tile, OFFSET=offset, ROUNDS_ONCE=once,
            OTHER_OFFSET=other_offset, OTHER_ROUNDS_ONCE=other_once, FACTOR=norm_factor,
            num_warps=min(16, max(1, tile // 256)), **launch_options(x),
        )  # fmt: skip
    return outs


def launch_norm(
    kernel, x: Tensor, vectors: tuple[Tensor | None, ...], eps: float, other: Tensor | None, out: Tensor | None,
    factor: float | None, **how: bool | float | None,
) -> Tensor:  # fmt: skip
    """Launch a norm with the sum before it, as `rms_norm` says. vectors: those of the kernel, its weight first."""
    num_rows, size = x.shape
    if out is None and vectors[0] is not None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    added = x if other is None else other
    assert x.stride(1) == 1 and added.stride(-1) == 1, "values of a row must be packed"
    # Another alignment would be another binary, and might sum in another order.
    assert x.data_ptr() % 16 == 0 and added.data_ptr() % 16 == 0, "tensors must be aligned"
    num_splits = added.shape[0] if added.dim() == 3 else 0
    assert not num_splits or added.is_contiguous() and added.dtype == torch.float32, "parts are packed float32"
    assert out is None or out.is_contiguous(), "rows must be packed"
    tile = next_power_of_2(size)
    if num_rows:
        kernel[(num_rows,)](
            x, added, *vectors, out, x.stride(0), 0 if other is None else other.stride(-2), eps, SIZE=size, TILE=tile,
            ADD=other is not None, NUM_SPLITS=num_splits, FACTOR=factor, num_warps=min(16, max(1, tile // 256)),
            **how, **launch_options(x),
        )  # fmt: skip
    return x if out is None else out
