"""The gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.kernels.reference import ACTIVATIONS
from nanoinfer.layers.formats.base import DENSE, Formats
from nanoinfer.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); gate and up are one matrix product.

    Raises:
        ValueError: `activation`, as a config calls it, is not supported.
    """

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
        gate_up = formats.as_held("gate_up_proj", {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        self.gate_up_proj = Linear(hidden_size, gate_up, formats=formats, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, formats=formats.below("down_proj"), **options)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, hidden_size]."""
        return self.down_proj(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`: [N, intermediate_size]."""
        return self.gate_up_proj(x, activation=self._activation)
