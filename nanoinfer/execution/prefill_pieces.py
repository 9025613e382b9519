"""The pieces of prefill steps, eagerly or from captured graphs.

The attention between two pieces depends on the sequences' lengths and histories, so it is launched eagerly. The rest
is about ten kernels per layer, at 13 us of host time each, so with few tokens the device would wait for the host. One
graph per piece replaces these launches.

A step of at most the largest captured token count is padded to the next captured count, with graphs or without. On CUDA
a larger step is padded to a number of rows at which the matrix library may be called (`counts.padded_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from nanoinfer.execution.graphs import GraphWork
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.state_tables import StateTables
from nanoinfer.execution.tables import DeviceTable, Packer
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.counts import padded_rows
from nanoinfer.models.step_tensors import FixedBuffers, FixedTensors, StepTensors


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


class PrefillPieces:
    """Pads and captures the pieces of prefill steps.

    Args:
        table: the steps' table. A step packs its tokens' inputs first, so that their addresses depend on the padded
            count alone: graphs read the inputs there.
        padding: token id, position and slots of a padding token.
        states: makes `StateRuns`; None: no layer keeps a state.

    Attributes:
        capture_num_tokens: padded token counts, ascending; a larger step runs eagerly.
        fixed: for each of these counts the tensors of its steps.
    """

    def __init__(
        self, resources: Resources, table: DeviceTable, padding: tuple[int, int, int], states: StateTables | None
    ) -> None:
        device, max_tokens = resources.runtime.device, resources.memory_plan.max_num_batched_tokens
        self._pads = resources.device.pads_rows
        self.capture_num_tokens = capture_num_tokens = resources.config.graph_num_tokens(max_tokens, resources.device)
        assert max(capture_num_tokens, default=0) <= max_tokens, "a padded step must fit into the table"
        self.counters = PrefillCounters()
        self._resources, self._table, self._padding, self._states = resources, table, padding, states
        self.buffers = FixedBuffers(resources.model.spec, max(capture_num_tokens, default=0), device)
        self.fixed = {count: FixedTensors(self._pack_padding(count)[1], self.buffers) for count in capture_num_tokens}

    def padded_count(self, num_tokens: int) -> int:
        """Return the smallest captured count that holds `num_tokens`; beyond the largest, as products are padded."""
        captured = next((count for count in self.capture_num_tokens if count >= num_tokens), None)
        return captured or (padded_rows(num_tokens) if self._pads else num_tokens)

    def begin(self, num_tokens: int, inputs: list[Tensor]) -> StepTensors:
        """Return the tensors of a step of `num_tokens` tokens, whose padded inputs lie in the table.

        inputs: as `pack_inputs` returns.
        """
        count = self.padded_count(num_tokens)
        self.counters.padded_tokens += count - num_tokens
        is_captured = ("prefill", count) in self._resources.graphs
        self.counters.graph_steps += is_captured
        self.counters.eager_steps += not is_captured
        return self.fixed[count] if count in self.fixed else StepTensors(*inputs)

    def works(self) -> Iterator[GraphWork]:
        """Yield the work to capture: each piece for each count, the largest first; the same in every mode."""
        pieces = self._resources.pieces
        for count, tensors in reversed(self.fixed.items()):
            launches = [partial(pieces.run, index, tensors) for index in range(len(pieces))]
            yield GraphWork(
                ("prefill", count), f"prefill graphs, {count} tokens", partial(self._reset_table, count), launches
            )

    def run_each_kind(self) -> None:
        """Run pieces that together use every kernel, for each count, on padding."""
        pieces = self._resources.pieces
        for count, tensors in self.fixed.items():
            self._reset_table(count)
            for index in pieces.one_of_each_kind:
                pieces.run(index, tensors)

    def _reset_table(self, count: int) -> None:
        """Fill the table with padding, for the warm-up run before a capture to compute.

        The run stores keys and values: with the slots of an earlier step it would overwrite those of running sequences.
        """
        self._pack_padding(count)[0].upload(self._resources.compute)

    def _pack_padding(self, count: int) -> tuple[Packer, list[Tensor]]:
        """Pack a step of padding only, and return its inputs."""
        token_id, position, slot = self._padding
        slots = np.full((len(self._resources.groups), count), slot)
        of_states = [] if self._states is None else self._states.of_step([], np.zeros(0, int), count, is_fixed=True)
        columns = [np.full(count, token_id), np.full(count, position), slots, *of_states]
        return pack_inputs(self._table, columns, num_live=0)


def pack_inputs(table: DeviceTable, columns: Iterable[np.ndarray], num_live: int) -> tuple[Packer, list[Tensor]]:
    """Begin a step's table with its padded inputs, at addresses that depend on their length alone: graphs read them.

    columns: token ids, positions, slots of each group and, if a layer keeps a state, those of `StateRuns`. num_live:
    how many of these are tokens.

    Returns:
        The packer, and the tensors that `StepTensors` begins with.
    """
    packer = Packer(table)
    live = packer.add([num_live])
    token_ids, positions, slots, *runs = (packer.add(column) for column in columns)
    return packer, [token_ids, positions, slots, live, *([StateRuns(*runs)] if runs else [])]
