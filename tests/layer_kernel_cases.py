"""Checks of the layer kernels against the torch code of `nanoinfer.layers`, for the interpreter and for a GPU."""

import torch

from nanoinfer.kernels.layers import act_and_mul, norm_rope, rms_norm, vector_linear
from nanoinfer.layers import OffsetRMSNorm, RMSNorm, find_activation, norm_and_rotate
from nanoinfer.rope import rope_table

EPS = 1e-6


def is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within one rounding of the dtype: sums may come in another order."""
    tolerance = max(1e-5, torch.finfo(want.dtype).eps)
    return torch.allclose(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance)


def make_norm(size: int, offset: bool, dtype: torch.dtype, device: str) -> RMSNorm:
    norm = (OffsetRMSNorm if offset else RMSNorm)(size, EPS, dtype=dtype, device=device)
    norm.weight.data = (torch.randn(size) * 0.2 + (not offset)).to(device, dtype)
    return norm


def check_rms_norm(size: int, offset: bool, dtype: torch.dtype, device: str) -> None:
    wide = torch.randn(5, size + 16).to(device, dtype)
    x, other = wide[:, :size], torch.randn(5, size).to(device, dtype)
    norm = make_norm(size, offset, dtype, device)
    unchanged, normed = rms_norm(x, norm.weight, EPS, offset=offset)
    assert unchanged is x and is_close(normed, norm.norm(x, norm.weight, EPS))
    total, normed = rms_norm(x, norm.weight, EPS, offset=offset, other=other)
    assert torch.equal(total, x + other) and is_close(normed, norm.norm(x + other, norm.weight, EPS))
    alone = rms_norm(x[3:4], norm.weight, EPS, offset=offset)[1]
    assert torch.equal(alone, rms_norm(x, norm.weight, EPS, offset=offset)[1][3:4]), "a row depends on its neighbours"


def check_norm_rope(
    heads: tuple[int, int, int], with_norm: bool, offset: bool, dtype: torch.dtype, device: str
) -> None:
    num_q_heads, num_kv_heads, head_dim = heads
    num_tokens, num_heads = 5, num_q_heads + 2 * num_kv_heads
    wide = torch.randn(num_tokens, num_heads * head_dim + 32).to(device, dtype)
    qkv = wide[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    table = rope_table({"rope_theta": 10000.0}, head_dim, 200, dtype, device)
    positions = torch.tensor([0, 7, 199, 3, 64], device=device)
    norms = tuple(make_norm(head_dim, offset, dtype, device) for _ in range(2)) if with_norm else None
    weights = None if norms is None else (norms[0].weight, norms[1].weight)
    got = norm_rope(qkv, num_q_heads, num_kv_heads, weights, EPS, offset, table, positions)
    on_cpu = None if norms is None else tuple(norm.cpu() for norm in norms)
    want = norm_and_rotate(qkv.cpu(), num_q_heads, num_kv_heads, on_cpu, table.cpu(), positions.cpu())
    assert got.shape == (num_tokens, num_q_heads + num_kv_heads, head_dim) and is_close(got, want)


def check_act_and_mul(size: int, activation: str, dtype: torch.dtype, device: str) -> None:
    gate_up = (3 * torch.randn(4, 2 * size)).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert is_close(act_and_mul(gate_up, activation), find_activation(activation)(gate) * up)


def check_vector_linear(
    size: int, num_rows: int, offset: bool, activation: str | None, dtype: torch.dtype, device: str
):
    """Every part on and off, against the same parts one after the other."""
    factor = 1 if activation is None else 2
    x = torch.randn(1, size).to(device, dtype)
    weight = (torch.randn(factor * num_rows, size) * size**-0.5).to(device, dtype)
    some_bias, residual = torch.randn(factor * num_rows).to(device, dtype), torch.randn(1, num_rows).to(device, dtype)
    norm = make_norm(size, offset, dtype, device)
    for with_norm, bias, other in ((True, None, None), (False, some_bias, residual), (True, some_bias, residual)):
        got = vector_linear(
            x, weight, bias, norm=norm.constants if with_norm else None, activation=activation, other=other
        )
        normed = norm.norm(x, norm.weight, EPS) if with_norm else x
        want = (normed.float() @ weight.float().T + (0 if bias is None else bias.float())).to(dtype)
        if activation is not None:
            gate, up = want.chunk(2, dim=-1)
            want = find_activation(activation)(gate) * up
        if other is not None:
            want = other + want
        assert got.shape == (1, num_rows)
        # Sums in another order may round to a neighbour before the gate and the residual round again.
        tolerance = 4 * max(1e-5, torch.finfo(dtype).eps)
        assert torch.allclose(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance)
