"""LayerNorm of rows, with the residual sum before it: `rms_norm` for models that subtract the mean and add a bias."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.rms_norm import addend, launch_norm, residual_sum, rounded


@triton.jit
def layer_norm_kernel(
    x,  # [N, SIZE], rows x_stride apart; becomes x + FACTOR * other
    other,  # as in `rms_norm_kernel`
    weight,  # [SIZE]
    bias,  # [SIZE]
    out,  # [N, SIZE]
    x_stride,
    other_stride,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET: tl.constexpr,  # the factor is 1 + weight, rounded
    ADD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FACTOR: tl.constexpr,  # None: 1
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        scale = rounded(1.0 + scale, weight)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = addend(x, other, row, columns, inside, other_stride, SIZE, NUM_SPLITS)
        value = residual_sum(x, value, added, None, row, columns, inside, x_stride, FACTOR)
    value = tl.where(inside, value - tl.sum(value) / SIZE, 0.0)
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    tl.store(out + row * SIZE + columns, (value * scale + shift).to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    offset: bool,
    other: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
) -> Tensor:
    """Return (x - mean(x)) / std(x) * weight + bias, rounded once; x: [N, size].

    bias: [size]. offset: the weight counts from 1, and the sum with 1 is rounded. Else as `rms_norm.rms_norm`.
    """
    return launch_norm(layer_norm_kernel, x, (weight, bias), eps, other, out, factor, OFFSET=offset)
