"""Projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.linear.counts import num_parts
from nanoinfer.kernels.operations import operations_of
from nanoinfer.layers.formats.base import DENSE, ExpandedFormat, Filling, Formats
from nanoinfer.layers.formats.parted import merge_formats
from nanoinfer.layers.norm import RMSNorm

HEAD_BLOCK = 2048
"""Where a library multiplies, so many rows of a head are a product of their own, wherever the rows lie: a library
chooses the order of sums by the shape of the weight."""


class Linear(nn.Module):
    """x @ weight.T + bias, for one or more projections of the same input, merged along the output.

    out_features: output features of each projection, by its name in the checkpoint. Their rows lie in this order in the
    weight, [sum(out_features), in_features], and in the bias. A single projection may be given as a number. formats:
    how the projections lie in memory, by these names, or by no name for a single one. `operations` are those of the
    device; `library_counts` are the row counts at which its library gives our kernels' bits on CUDA
    (`execution.products`); `scratch` is the buffer that `share_scratch` gives to all modules.
    `multiplies`: whether any product is asked of the module; `has_few_rows`: whether products have few rows.
    """

    multiplies = True
    has_few_rows = False

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device,
        formats: Formats = DENSE,
    ) -> None:
        super().__init__()
        self.merged = out_features if isinstance(out_features, dict) else None
        sizes = self.merged or {"": out_features}
        self.num_rows, self.in_features = sum(sizes.values()), in_features
        self.weights = merge_formats([formats.of_held(name) for name in sizes], list(sizes.values()))
        self.operations, self.library_counts, self.scratch = operations_of(device), frozenset(), None
        self.kept_matrix: Tensor | None = None
        self.weights.allocate(self, self.num_rows, in_features, dtype=dtype, device=device)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.num_rows, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor, out: Tensor | None = None, activation: str | None = None) -> Tensor:
        """[N, in_features] -> [N, num_rows], in `out` if that is given.

        activation: the rows are those of gate, then of up; the result is activation(gate) * up, [N, num_rows / 2].
        """
        product = self.weights.product(self, x, out, activation)
        if product is not None:
            return product
        if activation is not None and not self.operations.has_activation(activation, x):
            return self.operations.act_and_mul(self.forward(x), activation)
        weight, counts = self.weights.matrix(self), self.library_counts
        return self.operations.linear(x, weight, self.bias, activation=activation, out=out, library_counts=counts)

    def project_add_norm(self, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        """Add the projection of y, [N, in_features], to x, [N, num_rows], in place, and return the norm of x."""
        parts = self.num_parts if y.element_size() == 2 else 1
        if parts == 1:
            return norm.after_sum(x, self.forward(y))
        product = self.weights.product(self, y, parts=parts)
        if product is not None:
            return norm.after_sum(x, product)
        weight = self.weights.matrix(self)
        # The result is allocated before the parts. Behind them it would leave a hole where they lay, and what a gated
        # layer allocates next would not fit into the rest.
        out = torch.empty_like(x)
        product = self.operations.linear_parts(y, weight, parts, library_counts=self.library_counts)
        return norm.after_sum(x, product, out)

    @property
    def num_parts(self) -> int:
        """The number of parts of the sums in `project_add_norm` on CUDA, in bfloat16 and float16."""
        return 1 if self.bias is not None else num_parts(self.in_features)

    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Return what checkpoint tensors fill, by the end of their name: after this module's name, or its parent's."""
        filled, begin = {}, 0
        for name, count in (self.merged or {"": self.num_rows}).items():
            views = self.weights.views(self, begin, begin + count)
            if self.bias is not None:
                views = views | {"bias": self.bias[begin : begin + count]}
            filled |= {f"{name}.{ending}".removeprefix("."): view for ending, view in views.items()}
            begin += count
        return filled

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Fill weight and bias with random values."""
        self.weights.fill_with_noise(self, generator)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.02, generator=generator)


class Head(Linear):
    """The projection to logits, also of tied embeddings. It computes few rows, so it never uses the library."""

    has_few_rows = True

    def forward(self, x: Tensor, out: Tensor | None = None, activation: str | None = None) -> Tensor:
        """As `Linear`, without an activation."""
        has_own_kernels = device_of(x.device).is_fused and x.element_size() == 2
        if has_own_kernels or self.num_rows <= HEAD_BLOCK or self.bias is not None:
            return super().forward(x, out, activation)
        weight, out = self.weights.matrix(self), x.new_empty(len(x), self.num_rows) if out is None else out
        for begin in range(0, self.num_rows, HEAD_BLOCK):
            rows = slice(begin, begin + HEAD_BLOCK)
            out[:, rows] = self.operations.linear(x, weight[rows])
        return out


class Embedding(Head):
    """A weight [vocab_size, hidden_size]: rows of it by token id, and logits where the head is tied.

    is_on_host: whether it is allocated on the CPU, for memory that the device reads, and no product reads it there.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, is_tied: bool, is_on_host: bool = False, device, **options
    ) -> None:
        super().__init__(hidden_size, vocab_size, device="cpu" if is_on_host else device, **options)
        self.is_on_host, self.multiplies = is_on_host, is_tied and not is_on_host
        self.operations = operations_of(device)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Return the rows of these tokens: [N] int64 -> [N, hidden_size] in the model's dtype."""
        return self.weights.lookup(self, token_ids)


def scratch_size(model: nn.Module, has_kernels: bool) -> int:
    """Return the elements of the largest matrix that a projection needs a buffer for; see `WeightFormat`."""
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.multiplies]
    return max((module.weights.scratch_size(module, has_kernels) for module in linears), default=0)


def _expanded(model: nn.Module) -> list[Linear]:
    """Return the projections whose matrix is written for each product."""
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.multiplies]
    return [module for module in linears if isinstance(module.weights, ExpandedFormat)]


def matrix_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the matrices that `keep_matrices` keeps."""
    return dtype.itemsize * sum(module.num_rows * module.in_features for module in _expanded(model))


def keep_matrices(model: nn.Module) -> None:
    """Write the matrices of all weights once. They do not change, so neither does a product.

    For a CPU, which has no kernels that read a weight as it lies: there to write a matrix takes longer than to multiply
    a few rows with it.
    """
    for module in _expanded(model):
        module.kept_matrix = module.weights.matrix(module).clone()


def share_scratch(model: nn.Module, beside: Sequence[nn.Module] = (), *, dtype: torch.dtype, device) -> None:
    """Give all projections that need one, of a model and beside it, the same buffer for a matrix.

    They must run one after the other.
    """
    has_kernels = device_of(torch.device(device)).is_fused and dtype.itemsize == 2
    size = max(scratch_size(one, has_kernels) for one in (model, *beside))
    scratch = torch.empty(size, dtype=dtype, device=device) if size else None
    for module in (*model.modules(), *beside):
        if isinstance(module, Linear):
            module.scratch = scratch
