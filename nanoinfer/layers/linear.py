"""Projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.kernels.operations import operations_of
from nanoinfer.layers.formats.base import Filling, Formats, WeightFormat
from nanoinfer.layers.formats.dense import DENSE
from nanoinfer.layers.formats.parted import merged
from nanoinfer.layers.norm import RMSNorm


class Linear(nn.Module):
    """x @ weight.T + bias, for one or more projections of the same input, merged along the output.

    out_features: output features of each projection, by its name in the checkpoint. Their rows lie in this order in the
    weight, [sum(out_features), in_features], and in the bias. A single projection may be given as a number. formats:
    how the projections lie in memory, by these names, or by no name for a single one. `operations` are those of the
    device, for the format to multiply with; `scratch` is the buffer that `share_scratch` gives to all modules.
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
        self.parts = out_features if isinstance(out_features, dict) else None
        sizes = self.parts or {"": out_features}
        self.num_rows, self.in_features = sum(sizes.values()), in_features
        self.weights = merged([formats.of(part) for part in sizes], list(sizes.values()))
        self.operations, self.library_counts, self.scratch = operations_of(device), frozenset(), None
        self.weights.allocate(self, self.num_rows, in_features, dtype=dtype, device=device)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.num_rows, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights.project(self, x)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, of a merged projection of both."""
        return self.weights.project_gated(self, x, activation)

    def added_to(self, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        """Add the projection of y to x, in place, and return the norm of x."""
        return self.weights.project_add_norm(self, x, y, norm)

    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Return what checkpoint tensors fill, by the end of their name: after this module's name, or its parent's."""
        found, begin = {}, 0
        for part, count in (self.parts or {"": self.num_rows}).items():
            views = self.weights.views(self, begin, begin + count)
            if self.bias is not None:
                views = views | {"bias": self.bias[begin : begin + count]}
            found |= {f"{part}.{ending}".removeprefix("."): view for ending, view in views.items()}
            begin += count
        return found

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Fill weight and bias with random values."""
        self.weights.fill_with_noise(self, generator)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.02, generator=generator)


class Head(Linear):
    """The projection to logits, also of tied embeddings. It computes few rows, so it never uses the library."""

    has_few_rows = True

    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, in_features] -> [N, vocab_size], in `out` if that is given."""
        return self.weights.project(self, normed, out)


class Embedding(Head):
    """Rows of a weight [vocab_size, hidden_size], by token id; a tied head computes logits with the same weight."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        is_tied: bool,
        dtype: torch.dtype,
        device,
        weights: WeightFormat | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, dtype=dtype, device=device, formats=weights or DENSE)
        self.multiplies, self._dtype = is_tied, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weights.lookup(self, token_ids, self._dtype)


def scratch_size(model: nn.Module, has_kernels: bool) -> int:
    """Return the elements of the largest matrix that a projection needs a buffer for; see `WeightFormat`."""
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.multiplies]
    return max((module.weights.scratch_size(module, has_kernels) for module in linears), default=0)


def share_scratch(model: nn.Module, *, dtype: torch.dtype, device) -> None:
    """Give all projections that need one the same buffer for a matrix. They must run one after the other."""
    size = scratch_size(model, torch.device(device).type == "cuda" and dtype.itemsize == 2)
    scratch = torch.empty(size, dtype=dtype, device=device) if size else None
    for module in model.modules():
        if isinstance(module, Linear):
            module.scratch = scratch
