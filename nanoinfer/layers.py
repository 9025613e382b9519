"""The parts that layers are made of. Each rounds where transformers rounds, so that float32 results agree closely and
bfloat16 results differ by the order of sums alone.

Weights are allocated, not initialised: the loader fills every one. All shapes are per token: x is [N, features].

On CUDA norms, rotations and activations are fused Triton kernels, and so are whole projections of few rows; the torch
code beside them is their reference and what runs on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer import exact
from nanoinfer.errors import nearest, shown
from nanoinfer.kernels.counts import num_parts
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
        raise ValueError(f"activation {shown(name)} is not supported{hint}. Supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that takes no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


@dataclass(frozen=True)
class KVSlots:
    """Where a layer's new keys, values and queries go.

    kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer of the GPU pool; slots: [N] int32 or int64, block *
    block_size + offset, a negative one is skipped; q: [N, num_q_heads, head_dim], None: a new tensor.
    """

    kv: Tensor
    slots: Tensor
    q: Tensor | None = None

    def store(self, k: Tensor, v: Tensor) -> None:
        """k, v: [N, num_kv_heads, head_dim]."""
        kept = self.slots >= 0
        slots, block_size = self.slots[kept].long(), self.kv.shape[2]
        block, offset = slots // block_size, slots % block_size
        # As bytes: torch stores no float8 by index on the CPU.
        pool = self.kv.view(torch.uint8) if self.kv.dtype.itemsize == 1 else self.kv
        for place, values in enumerate((k[kept], v[kept])):
            pool[block, place, offset] = _stored(values, self.kv.dtype).view(pool.dtype)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As the KV cache holds them: float8 has no infinity, and larger values than its largest become NaN without this."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


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
        self.library_counts: frozenset[int] = frozenset()
        """Numbers of rows at which, on CUDA, the library gives our kernels' bits; see `nanoinfer.products`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, library_counts=self.library_counts)

    def added_to(self, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        """The norm of x, to which the projection of y was added, in place."""
        parts = self.num_parts
        if parts == 1 or not y.is_cuda or y.element_size() != 2:
            return norm.after_sum(x, self(y))
        return norm.after_sum(
            x, _kernels().linear_parts(y, self.weight, parts, library_counts=self.library_counts)
        )

    @property
    def num_parts(self) -> int:
        """Parts of the sums of `added_to` on CUDA, in bfloat16 and float16."""
        return 1 if self.bias is not None else num_parts(self.weight.shape[1])


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    library_counts: frozenset[int] = frozenset(),
) -> Tensor:
    """x @ weight.T + bias: the bits of a row depend on nothing but the row, the weight and the bias.

    x: [N, in_features]; weight: [num_rows, in_features]; out: [N, num_rows], for the result.
    """
    if x.is_cuda:
        return _kernels().linear(x, weight, bias, out=out, library_counts=library_counts)
    result = exact.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


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
            return _kernels().rms_norm(x, self.weight, self.eps, offset=self.offset)
        return self.norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, other: Tensor) -> Tensor:
        """The norm of x, to which `other` was added, in place.

        On CUDA `other` may be the parts of a sum, [parts, N, size] float32.
        """
        if x.is_cuda:
            return _kernels().rms_norm(x, self.weight, self.eps, offset=self.offset, other=other)
        x += other
        return self.norm(x, self.weight, self.eps)

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
    return x * exact.elementwise(torch.rsqrt, x.pow(2).mean(-1, keepdim=True) + eps)


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
        return self.down_proj(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """What `down_proj` takes: [N, intermediate_size]."""
        projection = self.gate_up_proj
        if x.is_cuda and x.element_size() == 2 and self.activation_name in _kernels().ACTIVATIONS:
            return _kernels().linear(
                x, projection.weight, projection.bias,
                activation=self.activation_name, library_counts=projection.library_counts,
            )  # fmt: skip
        gate, up = projection(x).chunk(2, dim=-1)
        return exact.elementwise(self._activation, gate) * up


def norm_rotate_store(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rope: Tensor,
    positions: Tensor,
    target: KVSlots,
) -> Tensor:
    """Norm and position of query and key heads; keys and values go to `target`.

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim]; norms: of a query and of a key head; rope: `rope_table`;
    positions: [N] int64. Returns the queries, [N, num_q_heads, head_dim], packed.
    """
    q = target.q
    if q is None:
        q = torch.empty(len(qkv), num_q_heads, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    if qkv.is_cuda:
        weights = None if norms is None else (norms[0].weight, norms[1].weight)
        eps, offset = (0.0, False) if norms is None else (norms[0].eps, norms[0].offset)
        _kernels().norm_rope_store(
            qkv, num_q_heads, num_kv_heads, weights, eps, offset, rope, positions, target.kv, target.slots, q
        )
        return q
    qk, v = qkv.split((num_q_heads + num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        # [num_qk_heads, head_dim]: each head with its own weight.
        weight = torch.cat((norms[0].weight.expand(num_q_heads, -1), norms[1].weight.expand(num_kv_heads, -1)))
        qk = norms[0].norm(qk, weight, norms[0].eps)
    rotated, k = apply_rope(qk, rope, positions).split((num_q_heads, num_kv_heads), dim=1)
    q.copy_(rotated)
    target.store(k, v)
    return q


@cache
def _kernels():
    """The Triton kernels, imported where a CUDA tensor asks for them: triton comes with CUDA builds of torch only."""
    return import_module("nanoinfer.kernels.layers")
