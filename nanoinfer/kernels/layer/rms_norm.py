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
def residual_sum(
    x, other, row, columns, inside, x_stride, other_stride,
    SIZE: tl.constexpr, ADD: tl.constexpr, NUM_SPLITS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Load a row of x as float32, and with ADD make it x + FACTOR * other first, each rounded, also in memory."""
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if NUM_SPLITS > 0:
            added = tl.zeros(columns.shape, tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                part = other + (split * tl.num_programs(0) + row) * SIZE + columns
                added += tl.load(part, mask=inside, other=0.0)
            added = rounded(added, x)
        else:
            added = tl.load(other + row * other_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if FACTOR is not None:
            added = rounded(added * FACTOR, x)
        value = rounded(value + added, x)
        tl.store(x + row * x_stride + columns, value.to(x.dtype.element_ty), mask=inside)
    return value


@triton.jit
def rms_norm_kernel(
    x,  # [N, SIZE], rows x_stride apart; becomes x + FACTOR * other
    other,  # [N, SIZE], rows other_stride apart; read with ADD; or [NUM_SPLITS, N, SIZE] float32, whose sum is added
    weight,  # [SIZE]
    out,  # [N, SIZE]
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
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    value = residual_sum(
        x, other, row, columns, inside, x_stride, other_stride, SIZE, ADD, NUM_SPLITS, FACTOR
    )  # fmt: skip
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    if OFFSET:
        value *= 1.0 + scale
    elif ROUNDS_ONCE:
        value *= scale
    else:
        value = rounded(value, x) * scale
    tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: bool,
    rounds_once: bool = False,
    other: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
) -> Tensor:
    """Return the norm of x, [N, size], in `out` if that is given. With `other`, x becomes x + factor * other first.

    x: [N, size], rows at any stride, changed in place; weight: [size]; other: [N, size] likewise, all of one dtype; or
    `other` as the parts of a sum, [splits, N, size] float32, packed. offset,
    rounds_once: as in `HeadSteps`. factor: None: 1.
    """
    return launch_norm(
        rms_norm_kernel, x, (weight,), eps, other, out, factor, OFFSET=offset, ROUNDS_ONCE=rounds_once
    )  # fmt: skip


def launch_norm(
    kernel, x: Tensor, vectors: tuple[Tensor, ...], eps: float, other: Tensor | None, out: Tensor | None,
    factor: float | None, **how: bool,
) -> Tensor:  # fmt: skip
    """Launch a norm with the sum before it, as `rms_norm` says. vectors: the kernel's, [size] each."""
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device) if out is None else out
    added = x if other is None else other
    assert x.stride(1) == 1 and added.stride(-1) == 1, "values of a row must be packed"
    # Another alignment would be another binary, and might sum in another order.
    assert x.data_ptr() % 16 == 0 and added.data_ptr() % 16 == 0, "tensors must be aligned"
    num_splits = added.shape[0] if added.dim() == 3 else 0
    assert not num_splits or added.is_contiguous() and added.dtype == torch.float32, "parts are packed float32"
    assert out.is_contiguous(), "rows must be packed"
    tile = next_power_of_2(size)
    if num_rows:
        kernel[(num_rows,)](
            x, added, *vectors, out, x.stride(0), 0 if other is None else other.stride(-2), eps, SIZE=size, TILE=tile,
            ADD=other is not None, NUM_SPLITS=num_splits, FACTOR=factor, num_warps=min(16, max(1, tile // 256)),
            **how, **launch_options(x),
        )  # fmt: skip
    return out
