"""How a router chooses experts for a row, and in what their products lie. Nothing here needs triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from torch import Tensor

from nanoinfer.kernels.linear.packed_weight import PackedWeight

WORKSPACE_BYTES = 128 * 2**20
"""About as many bytes of float32 products lie beside each other before they are added."""

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = "softmax", "sigmoid", "softmax of chosen"
"""What makes weights of logits: over all experts, each by itself, or over the chosen ones."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choice of a row's experts.

    Experts are chosen by descending logit, with "sigmoid" by descending sigmoid + bias; of equal ones the lowest number
    comes first. What is added to norm weights is added in the order of the choice.

    Attributes:
        num_experts, num_chosen: of a layer, and of a row.
        scores: `SOFTMAX`, `SIGMOID` or `SOFTMAX_OF_CHOSEN`.
        is_normed: whether a row's weights are divided by their sum.
        is_rounded: whether weights are rounded to the model's dtype.
        rounds_scores: whether scores, their sum and each product or quotient are, too.
        least: what is added to the sum that weights are divided by, of `SIGMOID`.
        num_groups, num_chosen_groups: the experts are cut into groups, of which only those with the largest sums of
            their two best take part.
        factor: on each weight.
        here: which experts this device has, [begin, end): their numbers count from the first one on, and those of the
            others are -1. None: all.
    """

    num_experts: int
    num_chosen: int
    scores: str = SOFTMAX
    is_normed: bool = True
    is_rounded: bool = False
    rounds_scores: bool = False
    least: float = 1e-20
    num_groups: int = 1
    num_chosen_groups: int = 1
    factor: float = 1.0
    here: tuple[int, int] | None = None

    @property
    def first_half(self) -> int:
        """A row's sum is kept in two: of experts below this number, and of the others."""
        return ceil(self.num_experts / 2)


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """activation(gate) * up; with a limit, clamped as in gpt-oss: (up + 1) * gate * sigmoid(alpha * gate)."""

    name: str
    limit: float | None = None
    alpha: float = 1.0


NAMES = ("codes", "scales", "zeros", "global_scale", "group_index", "high_bits", "factors", "bias")
"""The tensors of a weight. A wide one's rows are its `codes`."""


@dataclass(eq=False, kw_only=True)
class ExpertWeight:
    """A projection of all experts of a layer, where kernels find it: at the same offsets in the run of each expert.

    Attributes:
        num_rows, in_features: of one expert.
        packed: its tensors' shapes, on `meta`, and how they are packed; None: rows of the model's dtype.
        tensors: by name the pool of all runs, [elements], viewed in the tensor's dtype.
        offsets: by name the first byte in a run.
        stride: bytes of a run.
    """

    num_rows: int
    in_features: int
    packed: PackedWeight | None
    tensors: dict[str, Tensor]
    offsets: dict[str, int]
    stride: int


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: as kernels find them, and as matrices of the model's dtype.

    Attributes:
        gate_up: one weight, gate first, or one for each.
        matrices: index in the pool -> gate and up as one matrix, their bias, down, its bias.
    """

    gate_up: tuple[ExpertWeight, ...]
    down: ExpertWeight
    matrices: Callable[[int], tuple[Tensor, Tensor | None, Tensor, Tensor | None]]


def slice_width(num_pairs: int, hidden_size: int) -> int:
    """Return how many columns of the experts' products lie in the workspace at a time. The choice does not matter."""
    return min(hidden_size, max(128, WORKSPACE_BYTES // (4 * num_pairs) // 128 * 128))
