"""What a layer without attention keeps of a sequence: named tensors of fixed sizes, which its tokens update in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nanoinfer.kernels.layer.state_runs import CHUNK, StateRuns

STEP_UNIT = CHUNK
"""Tokens at whose multiples prefill steps of such models end, but at the end of a prompt. So a prompt is cut at
the same tokens however it comes to be computed, and a layer may compute so many at a time."""
ALIGNMENT = 128
"""Bytes at whose multiples each tensor of a state begins."""


@dataclass(frozen=True)
class StateTensor:
    """One of the tensors of a layer's state, of one sequence. dtype: None, where a family says so: the model's own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecurrentState:
    """What a layer without attention keeps. All of it is zero before a sequence's first token.

    No other sequence can share it, as it can share blocks.
    """

    tensors: tuple[StateTensor, ...]

    def with_dtype(self, dtype: torch.dtype) -> RecurrentState:
        """Return the same for a model of this dtype."""
        return RecurrentState(tuple(replace(one, dtype=one.dtype or dtype) for one in self.tensors))


def one_run(num_tokens: int, device: torch.device) -> StateRuns:
    """Return what a step of one prompt has, whose state lies in slot 0."""
    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    chunks = torch.arange(0, num_tokens, CHUNK, dtype=torch.int32, device=device)
    return StateRuns(zeros, zeros, torch.full_like(zeros, num_tokens), chunks, zeros[:0])


class StatePlace(NamedTuple):
    """Where a tensor of a layer's state lies in a slot: its first byte there."""

    layer: int
    tensor: StateTensor
    begin: int


def places(layers: Sequence[Any]) -> Iterator[StatePlace]:
    """Yield where each tensor lies in a slot, which holds the states that all layers keep of one sequence."""
    end = 0
    for layer, state in enumerate(layers):
        for tensor in state.tensors if isinstance(state, RecurrentState) else ():
            yield StatePlace(layer, tensor, end)
            end += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of a slot; 0: no layer keeps a state."""
    last = max(places(layers), key=lambda place: place.begin, default=None)
    return 0 if last is None else last.begin + -(-last.tensor.num_bytes // ALIGNMENT) * ALIGNMENT
