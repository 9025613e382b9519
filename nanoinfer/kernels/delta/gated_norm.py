"""The norm of each head, gated: what Gated DeltaNet's output projection reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.activation import activate
from nanoinfer.kernels.layer.rms_norm import rounded

HEADS_OF_A_PROGRAM = 8


@triton.jit
def gated_norm_kernel(
    x,  # [N, HEADS, SIZE], rows x_stride apart
    gate,  # [N, HEADS, SIZE], rows gate_stride apart
    weight,  # [SIZE]
    num_live,  # [1] int32
    out,  # [N, HEADS, SIZE]
    x_stride,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # of heads
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, TILE)[None, :]
    inside, at = (head < HEADS) & (column < SIZE), head * SIZE + column
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if row >= tl.load(num_live):
        return
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + eps)
    value = rounded(rounded(value, x) * scale, x)
    value *= activate(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32), False)
    tl.store(out + row * HEADS * SIZE + at, value.to(x.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_live: Tensor) -> Tensor:
    """Compute weight * norm(x) * silu(gate) of each head.

    The norm is rounded, and so is its product with the weight; silu and the product with it are float32.

    Args:
        x, gate: [N, heads, size], rows at any stride.
        weight: [size]; all in one dtype.
        num_live: [1] int32: rows from this number on are left as they are.

    Returns:
        [N, heads, size]; of padding anything.
    """
    num_rows, num_heads, size = x.shape
    out = torch.empty(num_rows, num_heads, size, dtype=x.dtype, device=x.device)
    assert x[0:1].is_contiguous() and gate[0:1].is_contiguous(), "values of a row must be packed"
    assert weight.dtype == gate.dtype == x.dtype, "all are of one dtype"
    if num_rows:
        block = min(HEADS_OF_A_PROGRAM, next_power_of_2(num_heads))
        gated_norm_kernel[(num_rows, triton.cdiv(num_heads, block))](
            x, gate, weight, num_live, out, x.stride(0), gate.stride(0), eps, HEADS=num_heads, SIZE=size, BLOCK=block,
            TILE=next_power_of_2(size), num_warps=4, **launch_options(x),
        )  # fmt: skip
    return out
