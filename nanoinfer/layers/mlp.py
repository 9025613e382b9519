"""MLPs, with a gate and without one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.kernels.reference import ACTIVATIONS
from nanoinfer.layers.formats.base import DENSE, Formats
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm


class MLP(nn.Module):
    """down(activation(up(x))).

    Raises:
        ValueError: `activation`, as a config calls it, is not supported.
    """

    width = 1
    """Values that `hidden` computes from a row, for each of the intermediate size."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device,
        formats: Formats = DENSE,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            hint = did_you_mean(activation, ACTIVATIONS)
            raise ValueError(
                f"activation {shown(activation)} is not supported{hint}. Supported: {', '.join(ACTIVATIONS)}"
            )
        options = dict(bias=bias, dtype=dtype, device=device)
        self._make_up(hidden_size, intermediate_size, formats, options)
        self.down_proj = Linear(intermediate_size, hidden_size, formats=formats.below("down_proj"), **options)
        self._activation = activation

    def _make_up(self, hidden_size: int, intermediate_size: int, formats: Formats, options: dict) -> None:
        self.up_proj = Linear(hidden_size, intermediate_size, formats=formats.below("up_proj"), **options)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, hidden_size]."""
        return self.down_proj(self.hidden(x))

    def add(self, x: Tensor, normed: Tensor, norm: RMSNorm, num_live: Tensor) -> Tensor:
        """Add the MLP of normed, [N, hidden_size], to x, in place, and return the norm of x.

        num_live: [1] int32, how many rows are tokens: all are computed alike.
        """
        return self.down_proj.project_add_norm(x, self.hidden(normed), norm)

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`: [N, intermediate_size]."""
        return self.up_proj.operations.act(self.up_proj(x), self._activation)


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); gate and up are one matrix product."""

    width = 3

    def _make_up(self, hidden_size: int, intermediate_size: int, formats: Formats, options: dict) -> None:
        gate_up = formats.as_held("gate_up_proj", {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        self.gate_up_proj = Linear(hidden_size, gate_up, formats=formats, **options)

    def hidden(self, x: Tensor) -> Tensor:
        return self.gate_up_proj(x, activation=self._activation)
