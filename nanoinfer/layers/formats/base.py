"""What a projection asks of the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.layers.norm import RMSNorm


class WeightFormat(ABC):
    """How the weights of a model's projections lie on the device, are filled from a checkpoint and are multiplied.

    One object serves all projections. What belongs to one projection lies in its module, as parameters that `allocate`
    registers and that only the format touches. The bits of each row that a projection returns depend on its row of x,
    the weight and the bias alone. A module is a `layers.linear.Linear`: its `bias` is None or [num_rows].
    """

    name: str
    """The `quant_method` of a config's quantization_config; "dense" if it has none."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        """settings: the config's quantization_config. Raises ValueError for those that are not supported."""

    @abstractmethod
    def allocate(self, module: nn.Module, num_rows: int, in_features: int, *, dtype: torch.dtype, device) -> None:
        """Register the parameters of a weight of [num_rows, in_features], not yet filled.

        dtype: of the rows that the projection takes and returns.
        """

    @abstractmethod
    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor]:
        """Return what a checkpoint's tensors fill of rows [begin, end), by the end of their name, such as "weight".

        Values of another floating-point type are cast on the way; others must have the type of their view.
        """

    @abstractmethod
    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Fill the weight with random values whose standard deviation is about 0.02."""

    @abstractmethod
    def project(self, module: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: [N, in_features] -> [N, num_rows], in `out` if that is given."""

    def project_gated(self, module: nn.Module, x: Tensor, activation: str) -> Tensor | None:
        """activation(gate) * up, for a weight that holds the rows of gate, then the rows of up. None: use `project`."""
        return None

    def project_add_norm(self, module: nn.Module, x: Tensor, y: Tensor, norm: RMSNorm) -> Tensor:
        """Add the projection of y to x, in place, and return the norm of x."""
        return norm.after_sum(x, self.project(module, y))
