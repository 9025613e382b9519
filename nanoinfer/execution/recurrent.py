"""The states of layers without attention: one tensor for each row, on the device for the engine's life."""

from __future__ import annotations

import torch

from nanoinfer.models.base import ModelSpec, RecurrentState


class RecurrentStates:
    """The recurrent states of all rows.

    They stay on the device in every mode: a state has a fixed size, and every step of its sequence reads it whole.

    Attributes:
        of_layer: layer -> [max_num_seqs + 1, *shape]; empty for most models.
        padding_row: the last row, which padding tokens read and write.
    """

    def __init__(self, spec: ModelSpec, max_num_seqs: int, device: torch.device) -> None:
        self.padding_row = max_num_seqs
        self.of_layer = {
            layer: torch.zeros(max_num_seqs + 1, *state.shape, dtype=state.dtype, device=device)
            for layer, state in enumerate(spec.layers)
            if isinstance(state, RecurrentState)
        }

    def reset(self, rows: torch.Tensor) -> None:
        """Make the states of `rows` zero, whose sequences begin: [n] int32 on the device; on the current stream."""
        for states in self.of_layer.values():
            states.index_fill_(0, rows.long(), 0)
