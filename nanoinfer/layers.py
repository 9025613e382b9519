"""The parts that layers are made of. Each rounds where transformers rounds, so that float32 results agree closely and
bfloat16 results differ by the order of sums alone.

Weights are allocated, not initialised: the loader fills every one. All shapes are per token: x is [N, features].

On CUDA norms, rotations and activations are fused Triton kernels, and so are whole projections of a single row; the
torch code beside them is their reference and what runs on the CPU.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.errors import nearest
from nanoinfer.rope import apply_rope

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def find_activation(name: str):
    """The elementwise function that a config calls `name`.

    Raises:
        ValueError: not one of the supported ones.
    """
    if name not in _ACTIVATIONS:
        guess = nearest(name, _ACTIVATIONS)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise ValueError(f"activation {name!r} is not supported{hint}. Supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that takes no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias, for one or more projections of the same input, merged along the output.

    out_features: output features of each projection, by its name in the checkpoint. Their rows lie in this order in
    weight [sum(out_features), in_features] and bias [sum(out_features)]. A projection alone may be given as a number.
    """

    def __init__(
        self, in_features: int, out_features: int | dict[str, int], *, bias: bool, dtype: torch.dtype, device
    ) -> None:
        super().__init__()
        self.parts = out_features if isinstance(out_features, dict) else None
        num_rows = sum(self.parts.values()) if self.parts else out_features
        self.weight = empty_weight(num_rows, in_features, dtype=dtype, device=device)
        self.bias = empty_weight(num_rows, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The projection of norm(x)."""
        if _is_one_row(x):
            return _kernels().vector_linear(x, self.weight, self.bias, norm=norm.constants)
        return self(norm(x))


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size], by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    The statistics are float32. x / rms(x) is rounded to x's dtype before the product with the weight, as in Llama.
    """

    neutral_weight = 1.0
    """The weight that leaves the normalised x as it is."""
    offset = False
    """Whether the weight counts from 1 and the product is rounded once; tells the kernel which of the two to run."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return _kernels().rms_norm(x, self.weight, self.eps, offset=self.offset)[1]
        return self.norm(x, self.weight, self.eps)

    @property
    def constants(self) -> tuple[Tensor, float, bool]:
        """Weight, epsilon and offset, as the kernels take them."""
        return self.weight, self.eps, self.offset

    def after_sum(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(x + other, its norm)."""
        if x.is_cuda:
            return _kernels().rms_norm(x, self.weight, self.eps, offset=self.offset, other=other)
        x = x + other
        return x, self.norm(x, self.weight, self.eps)

    @staticmethod
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., size] with a weight that broadcasts to it."""
        return weight * _over_rms(x, eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / rms(x), all in float32 and rounded once, as in Gemma."""

    neutral_weight = 0.0
    offset = True

    @staticmethod
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (_over_rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _over_rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); gate and up are one matrix product."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool, dtype: torch.dtype, device
    ) -> None:
        super().__init__()
        gate_up = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, gate_up, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._activation, self.activation_name = find_activation(activation), activation

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        if x.is_cuda and self.has_kernel:
            return self.down_proj(_kernels().act_and_mul(gate_up, self.activation_name))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(self._activation(gate) * up)

    @property
    def has_kernel(self) -> bool:
        return self.activation_name in _kernels().ACTIVATIONS


def two_residuals(o_proj: Linear, norm: RMSNorm, mlp: GatedMLP, x: Tensor, attn: Tensor) -> Tensor:
    """y + mlp(norm(y)) with y = x + o_proj(attn): the end of a plain layer."""
    if _is_one_row(x) and mlp.has_kernel:
        kernel = _kernels().vector_linear
        x = kernel(attn, o_proj.weight, o_proj.bias, other=x)
        gate_up, down = mlp.gate_up_proj, mlp.down_proj
        hidden = kernel(x, gate_up.weight, gate_up.bias, norm=norm.constants, activation=mlp.activation_name)
        return kernel(hidden, down.weight, down.bias, other=x)
    x, normed = norm.after_sum(x, o_proj(attn))
    return x + mlp(normed)


def norm_and_rotate(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rope: Tensor,
    positions: Tensor,
) -> Tensor:
    """Query and key heads with norm and position: [N, num_q_heads + num_kv_heads, head_dim].

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim]; norms: of a query and of a key head; rope: `rope_table`;
    positions: [N] int64.
    """
    if qkv.is_cuda:
        weights = None if norms is None else (norms[0].weight, norms[1].weight)
        eps, offset = (0.0, False) if norms is None else (norms[0].eps, norms[0].offset)
        return _kernels().norm_rope(qkv, num_q_heads, num_kv_heads, weights, eps, offset, rope, positions)
    qk = qkv[:, : num_q_heads + num_kv_heads]
    if norms is not None:
        # [num_qk_heads, head_dim]: each head with its own weight.
        weight = torch.cat((norms[0].weight.expand(num_q_heads, -1), norms[1].weight.expand(num_kv_heads, -1)))
        qk = norms[0].norm(qk, weight, norms[0].eps)
    return apply_rope(qk, rope, positions)


def _is_one_row(x: Tensor) -> bool:
    return x.is_cuda and x.shape[0] == 1


@cache
def _kernels():
    """The Triton kernels, imported where a CUDA tensor asks for them: triton comes with CUDA builds of torch only."""
    return import_module("nanoinfer.kernels.layers")
