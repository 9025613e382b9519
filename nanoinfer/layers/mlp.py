"""The gated MLP and its activations."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.common import exact
from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.layers.formats.base import Formats
from nanoinfer.layers.formats.dense import DENSE
from nanoinfer.layers.linear import Linear

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
        hint = did_you_mean(name, _ACTIVATIONS)
        raise ValueError(f"activation {shown(name)} is not supported{hint}. Supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); gate and up are one matrix product."""

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
        options = dict(bias=bias, dtype=dtype, device=device)
        gate_up = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, gate_up, formats=formats, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, formats=formats.below("down_proj"), **options)
        self._activation, self.activation_name = find_activation(activation), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`: [N, intermediate_size]."""
        hidden = self.gate_up_proj.gated(x, self.activation_name)
        if hidden is not None:
            return hidden
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return exact.elementwise(self._activation, gate) * up
