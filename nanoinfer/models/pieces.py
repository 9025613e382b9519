"""A model as pieces with cuts between them: what the engine runs, captures and measures.

A piece runs on the device without the host. At a cut the engine acts: it attends to keys and values, which may lie
anywhere, and waits for what the model wants from host memory. A cut at which nothing is wanted costs nothing.

A model is cut at its attentions, and before layers that keep a state and have experts: a layer's experts are awaited
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nanoinfer.models.base import AttentionState, ModelSpec
from nanoinfer.models.step_tensors import StepTensors
from offload import Cut


class Bound(NamedTuple):
    """Where a piece ends and the next one begins: before a layer, or in it, at its attention."""

    layer: int
    at_attention: bool

    @property
    def next_layer(self) -> int:
        """The first layer that lies whole behind it."""
        return self.layer + self.at_attention


def bounds(spec: ModelSpec) -> list[Bound]:
    """Return where the cuts lie between a model's pieces, ascending."""
    layers = enumerate(spec.layers)
    found = (Bound(layer, isinstance(state, AttentionState)) for layer, state in layers)
    return [one for one in found if one.at_attention or one.layer in spec.own_pieces]


@dataclass(frozen=True)
class DeviceState:
    """What pieces find on the device at fixed addresses, beside the weights.

    Attributes:
        gpu_kv: for each group of layers, and each place of a block, what attention reads, see `KVPart.view`.
        states: layer -> the tensors of its state by name, of all slots.
    """

    gpu_kv: Sequence[Sequence[Tensor] | Tensor]
    states: Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Piece:
    """What a model computes between two cuts.

    Attributes:
        kind: says of which kind it is, when that is asked. Pieces of one kind launch the same kernels with the same
            sizes, so one of them is measured and warmed up.
        run: enqueues the work on the current stream; may be captured.
        cut: behind the piece. Behind the last one lies the head, and no attention: a transfer only of its first slice.
    """

    kind: Callable[[], Hashable]
    run: Callable[[StepTensors, DeviceState], None]
    cut: Cut = Cut()
