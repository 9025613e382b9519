"""Matrix times one vector, with what comes before and after it: decode of a single sequence reads every weight once.

The product is bound by the bytes of the weight, so it runs on the plain cores: each program streams a few rows in wide
loads that are several tiles ahead, keeps a partial sum per column lane and reduces once at the end. Measured on an H200
(Qwen3-4B shapes, bf16): 14 us for the down projection against 16.5 us of the library's split-K product with its
reduction, 7.4 against 9.8 us for the output projection; and the norm before, the gate and the residual sum after it
cost no launch of their own. From two rows on the library's matrix units win.

Rounding follows `nanoinfer.layers`: a norm's two products, the projections and the gate are each rounded to the dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.activation import ACTIVATIONS, activate
from nanoinfer.kernels.rms_norm import rounded
from nanoinfer.kernels.shape import next_power_of_2

BLOCK_K = 512


@triton.jit
def vector_linear_kernel(
    x,  # [SIZE]
    norm_weight,  # [SIZE], read with NORM
    weight,  # [GATED ? 2 * num_rows : num_rows, SIZE], gate first
    bias,  # as many values as weight has rows, read with BIAS
    other,  # [num_rows], read with ADD
    out,  # [num_rows]
    eps,
    num_rows,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # SIZE padded to a power of two
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,  # the norm's weight counts from 1, and the product is rounded once
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    inside = row < num_rows
    scale = 1.0
    if NORM:
        # Every program works the statistics out anew: the vector is a few KiB in the cache.
        all_columns = tl.arange(0, TILE)
        whole = tl.load(x + all_columns, mask=all_columns < SIZE, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole) / SIZE + eps)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    first = weight + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    second = weight + (row + num_rows).to(tl.int64)[:, None] * SIZE + column[None, :]
    for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        in_size = start + column < SIZE
        mask = inside[:, None] & in_size[None, :]
        value = tl.load(x + start + column, mask=in_size, other=0.0).to(tl.float32)
        if NORM:
            norm = tl.load(norm_weight + start + column, mask=in_size, other=0.0).to(tl.float32)
            if OFFSET:
                value = rounded(value * scale * (1.0 + norm), x)
            else:
                value = rounded(rounded(value * scale, x) * norm, x)
        acc += tl.load(first + start, mask=mask, other=0.0).to(tl.float32) * value[None, :]
        if GATED:
            up += tl.load(second + start, mask=mask, other=0.0).to(tl.float32) * value[None, :]
    result = tl.sum(acc, 1)
    if BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    result = rounded(result, out)
    if GATED:
        gate = result
        result = tl.sum(up, 1)
        if BIAS:
            result += tl.load(bias + num_rows + row, mask=inside, other=0.0).to(tl.float32)
        result = rounded(activate(gate, GELU), out) * rounded(result, out)
    if ADD:
        result += tl.load(other + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def vector_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float, bool] | None = None,
    activation: str | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """other + activation(gate) * up, where (gate, up) = weight @ norm(x) + bias; each part only where it is given.

    x: [1, size]; weight: [num_rows, size], with an activation [2 * num_rows, size], gate first; bias: a value per row
    of weight; norm: weight [size], epsilon, and whether the weight counts from 1; activation: one of `ACTIVATIONS`;
    other: [1, num_rows]. All of one dtype. Returns [1, num_rows].
    """
    size = weight.shape[1]
    assert x.shape == (1, size) and x.stride(1) == 1 and weight.is_contiguous(), "one packed row and a packed weight"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "tensors must be aligned"
    assert activation is None or activation in ACTIVATIONS, f"no kernel for {activation!r}"
    num_rows = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(1, num_rows, dtype=x.dtype, device=x.device)
    norm_weight, eps, offset = (x, 0.0, False) if norm is None else norm
    # Few rows: many small programs, so that all cores get the same share.
    block_n, stages = (8, 3) if num_rows >= 4096 else (4, 4)
    stages = max(2, stages * 2 // x.element_size())  # shared memory for the same number of values ahead
    vector_linear_kernel[(triton.cdiv(num_rows, block_n),)](
        x, norm_weight, weight, x if bias is None else bias, x if other is None else other, out, eps, num_rows,
        SIZE=size, TILE=next_power_of_2(size), NORM=norm is not None, OFFSET=offset, BIAS=bias is not None,
        ADD=other is not None, GATED=activation is not None, GELU=activation not in (None, "silu"),
        BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
