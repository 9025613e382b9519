"""The layers of a prefill step between their attentions, as pieces that run eagerly or from captured graphs.

Piece l is `after_attention` of layer l - 1 and `before_attention` of layer l. The attention in between depends on the
sequences' lengths and histories, so it is launched eagerly. The rest is about ten kernels per layer, at 13 us of host
time each, so with few tokens the device would wait for the host. One graph per piece replaces these launches.

A step of at most the largest captured token count is padded to the next captured count, with graphs or without. On CUDA
a larger step is padded to a number of rows at which the matrix library may be called (`counts.padded_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.tables import DeviceTable, Packer
from nanoinfer.kernels.linear.counts import padded_rows
from nanoinfer.layers.qkv import KVSlots
from nanoinfer.models.base import DecoderModel, ModelSpec
from offload import Runtime, Stream

# Token id, position and slot of a padding token: the KV store skips negative slots.
PADDING = (0, 0, -1)


@dataclass
class PrefillCounters:
    """Running totals of prefill steps.

    Attributes:
        graph_steps: steps whose pieces ran from graphs.
        padded_tokens: padding of all steps.
    """

    graph_steps: int = 0
    eager_steps: int = 0
    padded_tokens: int = 0

    @property
    def graph_hit_rate(self) -> float:
        """The share of steps that ran from graphs; 0.0 before the first."""
        return self.graph_steps / max(1, self.graph_steps + self.eager_steps)


class StepTensors:
    """The tensors that the pieces of one step read and leave for the next piece; dropped when no longer needed.

    The rows are the step's tokens, then its padding: N in all.

    Attributes:
        token_ids, uploaded_positions, slots: [N] int32, in the step's table.
        positions: [N] int64.
        x: [N, hidden_size], the sum of all parts so far; after the last piece the input of the head.
        q: [N, num_q_heads, head_dim].
        attention: [N, num_q_heads, head_dim], which the attention fills; padding rows hold anything.
    """

    def __init__(self, table: Tensor, places: list[slice]) -> None:
        self.token_ids, self.uploaded_positions, self.slots = (table[place] for place in places)
        self.positions: Tensor | None = None
        self.x: Tensor | None = None
        self.q: Tensor | None = None
        self.attention: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def widen_positions(self) -> None:
        self.positions = self.uploaded_positions.long()

    def keep(self, x: Tensor) -> None:
        self.x = x

    def drop_q(self) -> None:
        """Drop q to make room for the gated layer, the largest part of a step."""
        self.q = None

    def reserve(self, spec: ModelSpec) -> None:
        """Allocate what the whole step needs.

        This comes first: allocated later, it would lie in the middle of tensors that come and go.
        """
        heads = (len(self), spec.attention.num_q_heads, spec.attention.head_dim)
        self.attention = torch.empty(heads, dtype=spec.dtype, device=self.token_ids.device)

    def attention_rows(self, count: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Return queries and attention output of `count` rows from `begin` on."""
        return self.q[begin : begin + count], self.attention[begin : begin + count]

    def input_rows(self, count: int, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and slots of `count` rows from `begin` on."""
        rows = slice(begin, begin + count)
        return self.token_ids[rows], self.uploaded_positions[rows], self.slots[rows]


class FixedTensors(StepTensors):
    """`StepTensors` at addresses that graphs hold: the first rows of buffers that all captured token counts share."""

    def __init__(self, table: Tensor, places: list[slice], buffers: FixedBuffers) -> None:
        super().__init__(table, places)
        count = len(self)
        self.positions, self.x = buffers.positions[:count], buffers.x[:count]
        self.q, self.attention = buffers.q[:count], buffers.attention[:count]

    def reserve(self, spec: ModelSpec) -> None:
        pass

    def widen_positions(self) -> None:
        self.positions.copy_(self.uploaded_positions)

    def keep(self, x: Tensor) -> None:
        self.x.copy_(x)

    def drop_q(self) -> None:
        pass


class FixedBuffers:
    """Buffers of `num_tokens` rows; see `StepTensors`. `memory.plan` counts their bytes."""

    def __init__(self, spec: ModelSpec, num_tokens: int, device: torch.device) -> None:
        heads = (num_tokens, spec.attention.num_q_heads, spec.attention.head_dim)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.x = torch.zeros(num_tokens, spec.hidden_size, dtype=spec.dtype, device=device)
        self.q = torch.zeros(heads, dtype=spec.dtype, device=device)
        self.attention = torch.zeros(heads, dtype=spec.dtype, device=device)


class PrefillPieces:
    """Runs the pieces of prefill steps.

    Args:
        table: the steps' table. Token ids, positions and slots are what each step packs first, so their places depend
            on the padded count alone, and graphs read them there.
        capture_num_tokens: padded token counts, ascending; a larger step runs eagerly.
    """

    def __init__(
        self,
        runtime: Runtime,
        compute: Stream,
        model: DecoderModel,
        gpu_kv: Tensor,
        table: DeviceTable,
        capture_num_tokens: list[int],
    ) -> None:
        self.capture_num_tokens = capture_num_tokens
        self.counters = PrefillCounters()
        self._runtime, self._compute, self._table = runtime, compute, table
        self._model, self._gpu_kv = model, gpu_kv
        self._pads = runtime.device.type == "cuda"
        self.buffers = FixedBuffers(model.spec, max(capture_num_tokens, default=0), runtime.device)
        self._fixed = {
            count: FixedTensors(table.tensor, self._pack_padding(count)[1], self.buffers)
            for count in capture_num_tokens
        }
        self.graphs = Graphs(runtime, compute)

    @property
    def num_pieces(self) -> int:
        return self._model.spec.num_layers + 1

    def padded_count(self, num_tokens: int) -> int:
        """Return the smallest captured count that holds `num_tokens`; beyond the largest, as products are padded."""
        captured = next((count for count in self.capture_num_tokens if count >= num_tokens), None)
        return captured or (padded_rows(num_tokens) if self._pads else num_tokens)

    def begin(self, num_tokens: int, places: list[slice]) -> StepTensors:
        """The tensors of a step of `num_tokens` tokens, whose padded ids, positions and slots lie at `places`."""
        count = self.padded_count(num_tokens)
        self.counters.padded_tokens += count - num_tokens
        self.counters.graph_steps += count in self.graphs
        self.counters.eager_steps += count not in self.graphs
        return self._fixed[count] if count in self._fixed else StepTensors(self._table.tensor, places)

    def enqueue(self, index: int, tensors: StepTensors) -> None:
        """Enqueues piece `index` on the compute stream; the last one leaves the head's input in `tensors.x`."""
        self.graphs.run(len(tensors), partial(self._run, index, tensors), index)

    @property
    def is_captured(self) -> bool:
        """Whether `capture` would find nothing to capture."""
        return all(count in self.graphs for count in self.capture_num_tokens)

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture each piece for each count, the largest first, so that the shared pool grows only once.

        The pieces are the same in every mode, so graphs that exist already are kept.
        """
        for count in reversed(self.capture_num_tokens):
            if count not in self.graphs:
                # The warm-up run stores keys and values. With the slots of an earlier step it would overwrite keys and
                # values of running sequences.
                self._pack_padding(count)[0].upload(self._table, self._compute)
                tensors = self._fixed[count]
                self.graphs.capture(count, *(partial(self._run, index, tensors) for index in range(self.num_pieces)))
            progress(f"prefill graphs, {count} tokens")

    def run_each_kind(self) -> None:
        """Run pieces that together use every kernel, for each count, on padding."""
        for count, tensors in self._fixed.items():
            self._pack_padding(count)[0].upload(self._table, self._compute)
            for index in (0, 1, self.num_pieces - 1):
                self._run(index, tensors)

    def _run(self, index: int, tensors: StepTensors) -> None:
        model = self._model
        if index == 0:
            tensors.widen_positions()
            x, normed = model.embed(tensors.token_ids.long())
            tensors.keep(x)
        else:
            tensors.drop_q()
            normed = model.after_attention(index - 1, tensors.x, tensors.attention)
        if index == model.spec.num_layers:
            tensors.keep(normed)
            return
        target = KVSlots(self._gpu_kv[index], tensors.slots, tensors.q)
        tensors.q = model.before_attention(index, normed, tensors.positions, target)

    @staticmethod
    def _pack_padding(count: int) -> tuple[Packer, list[slice]]:
        """Pack a step of padding only, and return where its token ids, positions and slots lie."""
        packer = Packer()
        return packer, [packer.add(np.full(count, value)) for value in PADDING]
