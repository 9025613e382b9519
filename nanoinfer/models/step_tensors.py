"""The tensors that the pieces of a step read, and leave for the next piece."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.models.base import ModelSpec


@dataclass(eq=False)
class StepTensors:
    """The tensors of one step, dropped when no longer needed. Its N rows are tokens, then padding.

    Where x, queries, attention and inputs of layers are given, the step uses these buffers and allocates none. Queries
    and attention are flat: layers of several shapes take turns in them (`AttentionSpec.heads_of`).

    Attributes:
        token_ids, given_positions: [N] int32 or int64.
        slots: [groups of layers, N] int32 or int64, each as in `KVSlots`.
        num_live: [1] int32, how many rows are tokens. Padding is not a piece's to touch, where that matters.
        runs: which state each token belongs to; None if no layer keeps one.
        positions: [N], int64 from the first piece on.
        x: [N, hidden_size], the residual sum so far; after the last piece the input of the head.
        queries: [N * most of a token], where layers leave q; None: each makes a new tensor.
        attention: [N * most of a token], which the attention fills; padding rows hold anything.
        layer_inputs: [N, layer_inputs_size], which the first piece fills, where the model has them.
        normed: [N, hidden_size], what a piece left that ends before a layer; of a buffer, if there is one.
        gates: [N, most of a token], what each layer multiplies its attention by, where the model has them.
        q: [N, num_q_heads, head_dim], what the last piece left where queries are not given.
    """

    token_ids: Tensor
    given_positions: Tensor
    slots: Tensor
    num_live: Tensor
    runs: StateRuns | None = None
    x: Tensor | None = None
    queries: Tensor | None = None
    attention: Tensor | None = None
    layer_inputs: Tensor | None = None
    normed: Tensor | None = None
    gates: Tensor | None = None

    def __post_init__(self) -> None:
        self.positions, self.q = self.given_positions, None

    def __len__(self) -> int:
        return len(self.token_ids)

    def widen_positions(self) -> None:
        """Make `positions` of the given ones."""
        self.positions = self.given_positions.long()

    def set_x(self, x: Tensor) -> None:
        """Take over x, [N, hidden_size]."""
        self.x = x

    def set_normed(self, normed: Tensor) -> None:
        """Leave the next layer's norm of x to the next piece."""
        self.normed = normed

    def take_normed(self) -> Tensor:
        """Return what the last piece left, which is dropped here: the piece needs the room."""
        normed, self.normed = self.normed, None
        return normed

    def drop_q(self) -> None:
        """Drop q to make room for the gated layer, the largest part of a step."""
        self.q = None

    def reserve(self, spec: ModelSpec) -> None:
        """Allocate what the whole step needs.

        This comes first: allocated later, it would lie in the middle of tensors that come and go.
        """
        if self.attention is None:
            self.attention = torch.empty(len(self) * spec.q_size, dtype=spec.dtype, device=self.token_ids.device)
        if self.layer_inputs is None and (size := spec.layer_inputs_size):
            self.layer_inputs = torch.empty(len(self), size, dtype=spec.dtype, device=self.token_ids.device)
        if self.gates is None and spec.gate_size:
            self.gates = torch.empty(len(self), spec.gate_size, dtype=spec.dtype, device=self.token_ids.device)

    def gates_of(self, shape: AttentionSpec) -> Tensor | None:
        """Return the gates of a layer of this shape, [N, num_q_heads, head_dim]; None: there are none."""
        return None if self.gates is None else shape.heads_of(self.gates.view(-1), len(self))

    def attention_rows(self, shape: AttentionSpec, count: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Return queries and attention output of `count` rows from `begin` on, of a layer of this shape: each
        [count, num_q_heads, head_dim]."""
        rows = slice(begin, begin + count)
        q = self.q if self.queries is None else shape.heads_of(self.queries, len(self))
        return q[rows], shape.heads_of(self.attention, len(self))[rows]

    def input_rows(self, count: int, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and slots, [groups, count], of rows from `begin` on, as the first piece reads."""
        rows = slice(begin, begin + count)
        return self.token_ids[rows], self.given_positions[rows], self.slots[:, rows]


class FixedBuffers:
    """Buffers of `num_tokens` rows; see `StepTensors`. `memory.working` counts their bytes."""

    def __init__(self, spec: ModelSpec, num_tokens: int, device: torch.device) -> None:
        self._size = spec.q_size
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.x = torch.zeros(num_tokens, spec.hidden_size, dtype=spec.dtype, device=device)
        # Not zeros_like: on the meta device, where plans are counted, torch imports sympy for it.
        sizes = [num_tokens * spec.q_size] * 2
        self.queries, self.attention = (torch.zeros(size, dtype=spec.dtype, device=device) for size in sizes)
        self._more, self.normed = {}, None
        if spec.layer_input_size:
            shape = num_tokens, spec.layer_inputs_size
            self._more["layer_inputs"] = torch.zeros(shape, dtype=spec.dtype, device=device)
        if spec.own_pieces:
            self.normed = torch.zeros(num_tokens, spec.hidden_size, dtype=spec.dtype, device=device)
            self._more["normed"] = self.normed
        if spec.gate_size:
            self._more["gates"] = torch.zeros(num_tokens, spec.gate_size, dtype=spec.dtype, device=device)

    def first(self, count: int) -> dict[str, Tensor]:
        """Return the first rows, as arguments of `StepTensors`."""
        size = count * self._size
        found = dict(x=self.x[:count], queries=self.queries[:size], attention=self.attention[:size])
        return found | {name: buffer[:count] for name, buffer in self._more.items()}


class FixedTensors(StepTensors):
    """`StepTensors` at addresses that graphs hold: the first rows of buffers that all captured token counts share.

    Args:
        inputs: token ids, positions, slots, the number of live rows and, if need be, runs.
    """

    def __init__(self, inputs: list[Tensor], buffers: FixedBuffers) -> None:
        super().__init__(*inputs, **buffers.first(len(inputs[0])))
        self.positions = buffers.positions[: len(self)]

    def widen_positions(self) -> None:
        self.positions.copy_(self.given_positions)

    def set_x(self, x: Tensor) -> None:
        self.x.copy_(x)

    def set_normed(self, normed: Tensor) -> None:
        self.normed.copy_(normed)

    def take_normed(self) -> Tensor:
        return self.normed
