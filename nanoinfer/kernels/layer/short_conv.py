"""A causal convolution of a few taps along each sequence, between two gates or before an activation.

Its state is what the taps still reach.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import activate
from nanoinfer.kernels.layer.rms_norm import rounded
from nanoinfer.kernels.layer.state_runs import StateRuns

TILE = 512


@triton.jit
def input_at(
    x, stride, own_state, index, begin, column, inside, SIZE: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr
):
    """Return the input at a token of a run that begins at `begin`, or, before that, what the state holds of it.

    With GATED it is B * z, rounded to the model's dtype.
    """
    value = tl.zeros_like(column).to(x.dtype.element_ty)
    if index >= begin:
        at = x + index.to(tl.int64) * stride + column
        value = tl.load(at, mask=inside, other=0.0)
        if GATED:
            last = tl.load(at + 2 * SIZE, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) * last).to(x.dtype.element_ty)
    else:
        place = TAPS - 1 + index - begin
        value = tl.load(own_state + place * SIZE + column, mask=inside, other=0.0)
    return value


@triton.jit
def convolved(
    x, stride, weight, bias, own_state, out, index, begin, column, inside, SIZE: tl.constexpr, TAPS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Compute one token: the taps' products are added to the bias in ascending order of the tokens, none is rounded."""
    total = tl.zeros_like(column).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        value = input_at(
            x, stride, own_state, index - (TAPS - 1 - tap), begin, column, inside, SIZE, TAPS, GATED
        ).to(tl.float32)  # fmt: skip
        factor = tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(factor, value, total)
    total = rounded(total, x)
    if GATED:
        total *= tl.load(x + index.to(tl.int64) * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    else:
        total = activate(total, False)
    tl.store(out + index.to(tl.int64) * SIZE + column, total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def keep_inputs(
    x, stride, own_state, target, end, begin, column, inside, SIZE: tl.constexpr, TAPS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Leave in `target` the last inputs before token `end` of a run. It may be where the state before the run lies."""
    for place in tl.static_range(TAPS - 1):  # ascending: a place is read before the next one writes there
        value = input_at(x, stride, own_state, end - (TAPS - 1 - place), begin, column, inside, SIZE, TAPS, GATED)
        tl.debug_barrier()  # a late thread may not have read what another one writes
        tl.store(target + place * SIZE + column, value, mask=inside)
        tl.debug_barrier()  # nor read what one has not written yet


@triton.jit
def short_conv_kernel(
    x,  # [N, 3 * SIZE], rows stride apart: B, C, z; without GATED [N, SIZE]
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
    GATED: tl.constexpr,
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
    own_slot = tl.load(slots + begin)
    own_state = state + own_slot.to(tl.int64) * state_stride
    if index >= begin + TAPS - 1:  # its taps reach tokens of this step alone
        convolved(x, stride, weight, bias, own_state, out, index, begin, column, inside, SIZE, TAPS, GATED)
        slot = tl.load(slots + index)
        if slot != own_slot:  # what is behind this token is kept, too
            target = state + slot.to(tl.int64) * state_stride
            keep_inputs(x, stride, own_state, target, index + 1, begin, column, inside, SIZE, TAPS, GATED)
        return
    if index > begin:
        return
    # The program of a run's first token is the only one that touches the state before the run, so that nobody reads
    # what it writes, and it does so last.
    end = tl.load(ends + index)
    for later in tl.static_range(TAPS - 1):
        if index + later < end:
            convolved(
                x, stride, weight, bias, own_state, out, index + later, begin, column, inside, SIZE, TAPS, GATED
            )  # fmt: skip
            slot = tl.load(slots + index + later)
            if slot != own_slot:
                target = state + slot.to(tl.int64) * state_stride
                keep_inputs(x, stride, own_state, target, index + later + 1, begin, column, inside, SIZE, TAPS, GATED)
    if tl.load(slots + end - 1) != own_slot:
        end = index + 1
    keep_inputs(x, stride, own_state, own_state, end, begin, column, inside, SIZE, TAPS, GATED)


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
        runs: as in `StateRuns`; each slot gets the inputs up to the last token of the run that names it.
        num_live: [1] int32: rows from this number on are left as they are.

    Returns:
        [N, size].
    """
    return _launch(projected, weight, bias, state, runs, num_live, is_gated=True)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor
) -> Tensor:
    """Compute silu(conv(x)) of each token as `short_conv` computes conv, of x: [N, size] in place of B * z."""
    return _launch(x, weight, bias, state, runs, num_live, is_gated=False)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns, num_live: Tensor, is_gated: bool
) -> Tensor:
    size, taps = weight.shape
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1 and weight.is_contiguous() and state[0].is_contiguous(), "values must be packed"
    assert state.dtype == x.dtype, "the state holds inputs as they are"
    if len(x):
        tile = min(TILE, triton.next_power_of_2(size))
        short_conv_kernel[(len(x), triton.cdiv(size, tile))](
            x, weight, bias, state, *runs[:3], num_live, out, x.stride(0), state.stride(0), SIZE=size, TAPS=taps,
            GATED=is_gated, TILE=tile, num_warps=4, **launch_options(x, fuses=False),
        )  # fmt: skip
    return out
