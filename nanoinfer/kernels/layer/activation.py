"""Activations in one pass: activation(gate) * up of the fused gate and up projection, and those without a gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.rms_norm import rounded

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ACTIVATIONS_WITHOUT_GATE = (*ACTIVATIONS, "relu2")
TILE = 1024


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU, or the tanh form of GELU, of float32 values."""
    if GELU:
        # 0.5 (1 + tanh(z)) is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        return gate * tl.sigmoid(gate)


@triton.jit
def clamped(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """(up + 1) * gate * sigmoid(ALPHA * gate) of float32 values within the limit; a NaN stays one."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + 1.0) * (gate * tl.sigmoid(gate * ALPHA))


@triton.jit
def act_and_mul_kernel(
    gate_up,  # [N, 2 * SIZE], rows stride apart
    out,  # [N, SIZE]
    stride,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # None: no clamp
    ALPHA: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_in(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if LIMIT is None:
        result = rounded(activate(gate, GELU), gate_up) * up
    else:
        result = clamped(gate, up, LIMIT, ALPHA)
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


def act_and_mul(
    gate_up: Tensor, activation: str, limit: float | None = None, alpha: float = 1.0, *, fuses: bool = True
) -> Tensor:
    """Compute activation(gate) * up.

    gate_up: [N, 2 * size], gate first; activation: one of `ACTIVATIONS`; limit, alpha: of a `GatedActivation`; fuses:
    see `launch_options`. Returns [N, size].
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "values of a row must be packed"
    assert limit is not None or activation in ACTIVATIONS, f"no kernel for {activation!r}"
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        act_and_mul_kernel[(num_rows, triton.cdiv(size, TILE))](
            gate_up, out, gate_up.stride(0), SIZE=size, GELU=activation != "silu", LIMIT=limit, ALPHA=alpha,
            TILE=TILE, num_warps=4, **launch_options(gate_up, fuses=fuses),
        )  # fmt: skip
    return out


@triton.jit
def act_kernel(x, count, ACTIVATION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    let_next_in(PDL)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu2":
        value = tl.where(value < 0, 0.0, value)  # a NaN stays one
        value *= value
    else:
        value = activate(value, ACTIVATION != "silu")
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


def act(x: Tensor, activation: str) -> Tensor:
    """Compute activation(x), in place. x: packed; activation: one of `ACTIVATIONS_WITHOUT_GATE`."""
    assert x.is_contiguous(), "values must be packed"
    assert activation in ACTIVATIONS_WITHOUT_GATE, f"no kernel for {activation!r}"
    if x.numel():
        act_kernel[(triton.cdiv(x.numel(), TILE),)](
            x, x.numel(), ACTIVATION=activation, TILE=TILE, num_warps=4, **launch_options(x)
        )  # fmt: skip
    return x
