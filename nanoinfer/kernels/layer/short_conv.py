"""A causal convolution of a few taps along each sequence, between two gates; its state is what the taps still reach."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.state_runs import StateRuns

TILE = 512


@triton.jit
def gated(projected, stride, index, column, inside, SIZE: tl.constexpr):
    """Return the input of the convolution at one token of the step, B * z, rounded to the model's dtype."""
    at = projected + index.to(tl.int64) * stride + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(at + 2 * SIZE, mask=inside, other=0.0).to(tl.float32)
    return (first * last).to(projected.dtype.element_ty)


@triton.jit
def input_at(projected, stride, own_state, index, begin, column, inside, SIZE: tl.constexpr, TAPS: tl.constexpr):
    """Return the input at a token of a run that begins at `begin`, or, before that, what the state holds of it."""
    value = tl.zeros_like(column).to(projected.dtype.element_ty)
    if index >= begin:
        value = gated(projected, stride, index, column, inside, SIZE)
    else:
        place = TAPS - 1 + index - begin
        value = tl.load(own_state + place * SIZE + column, mask=inside, other=0.0)
    return value


@triton.jit
def convolved(
    projected, stride, weight, bias, own_state, out, index, begin, column, inside, SIZE: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Compute one token: the taps' products are added to the bias in ascending order of the tokens, none is rounded."""
    total = tl.zeros_like(column).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        value = input_at(
            projected, stride, own_state, index - (TAPS - 1 - tap), begin, column, inside, SIZE, TAPS
        ).to(tl.float32)  # fmt: skip
        factor = tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(factor, value, total)
    dtype: tl.constexpr = projected.dtype.element_ty
    gate = tl.load(projected + index.to(tl.int64) * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    value = (gate * total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + index.to(tl.int64) * SIZE + column, value, mask=inside)


@triton.jit
def short_conv_kernel(
    projected,  # [N, 3 * SIZE], rows stride apart: B, C, z
    weight,  # [SIZE, TAPS]
    bias,  # [SIZE]; None: none
    state,  # [slots, TAPS - 1, SIZE], slots state_stride apart
    slots,  # [N] int32
    begins,
    ends,
    num_live,  # [1] int32
    out,  # [N, SIZE]
    stride,
    state_stride,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if index >= tl.load(num_live):
        return
    begin = tl.load(begins + index)
    own_state = state + tl.load(slots + index).to(tl.int64) * state_stride
    if index >= begin + TAPS - 1:  # its taps reach tokens of this step alone
        convolved(projected, stride, weight, bias, own_state, out, index, begin, column, inside, SIZE, TAPS)
        return
    if index > begin:
        return
    # The program of a run's first token is the only one that touches the state, so that nobody reads what it writes.
    end = tl.load(ends + index)
    for later in tl.static_range(TAPS - 1):
        if index + later < end:
            convolved(
                projected, stride, weight, bias, own_state, out, index + later, begin, column, inside, SIZE, TAPS
            )  # fmt: skip
    for place in tl.static_range(TAPS - 1):  # ascending: a place is read before the next one writes there
        value = input_at(projected, stride, own_state, end - (TAPS - 1 - place), begin, column, inside, SIZE, TAPS)
        tl.debug_barrier()  # a late thread may not have read what another one writes
        tl.store(own_state + place * SIZE + column, value, mask=inside)


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor
) -> Tensor:
    """Compute C * conv(B * z) of each token, and leave in the state the last inputs of the convolution.

    Each product of the gates is rounded. The convolution is a float32 sum, of the bias first, then in ascending order
    of the tokens, to which a product is added without being rounded; then it is rounded.

    Args:
        projected: [N, 3 * size], B, C and z.
        weight, bias: [size, taps] and [size], in the same dtype; the last tap is the token's own.
        state: [slots, taps - 1, size], the inputs before each run, the newest last; changed in place.
        runs: as in `StateRuns`.
        num_live: [1] int32: rows from this number on are left as they are.

    Returns:
        [N, size].
    """
    size, taps = weight.shape
    out = torch.empty(len(projected), size, dtype=projected.dtype, device=projected.device)
    assert projected.stride(1) == 1 and weight.is_contiguous() and state[0].is_contiguous(), "values must be packed"
    assert state.dtype == projected.dtype, "the state holds inputs as they are"
    if len(projected):
        tile = min(TILE, triton.next_power_of_2(size))
        short_conv_kernel[(len(projected), triton.cdiv(size, tile))](
            projected, weight, bias, state, *runs[:3], num_live, out, projected.stride(0), state.stride(0), SIZE=size,
            TAPS=taps, TILE=tile, num_warps=4, **launch_options(projected, fuses=False),
        )  # fmt: skip
    return out
