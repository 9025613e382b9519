"""The states of layers without attention: slots on the device, one for each sequence that runs."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.models.base import ModelSpec
from nanoinfer.models.states import places


class States:
    """The states of all sequences that run, in every mode: a state has a fixed size, and every step reads it whole.

    A slot holds what all layers keep of a sequence, one behind the other, so that it is moved as one run of bytes.

    Attributes:
        pool: [num_slots + 1, slot bytes] uint8.
        of_layer: layer -> name -> [num_slots + 1, *shape], views of it; empty for most models.
        padding_slot: the last one, which padding tokens name.
    """

    def __init__(self, spec: ModelSpec, num_slots: int, device: torch.device) -> None:
        self.padding_slot = num_slots
        self.pool = torch.zeros(num_slots + 1, spec.state_bytes, dtype=torch.uint8, device=device)
        self.of_layer: dict[int, dict[str, Tensor]] = {}
        for layer, tensor, begin in places(spec.layers):
            values = self.pool[:, begin : begin + tensor.num_bytes].view(tensor.dtype)
            self.of_layer.setdefault(layer, {})[tensor.name] = values.unflatten(1, tensor.shape)

    def reset(self, slots: Tensor) -> None:
        """Make the states in `slots` zero, whose sequences begin: [n] int32 on the device; on the current stream."""
        if self.of_layer and len(slots):
            self.pool.index_fill_(0, slots.long(), 0)
