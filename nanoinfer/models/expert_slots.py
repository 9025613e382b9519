"""Experts that lie in host memory, and pass to the GPU one by one, when a row chooses them.

Layers whose experts are runs of one length share a pool, in which a run is known by its index:

    two areas     a layer's experts each: layers use them in turn in large steps, which the copy engine fills ahead
    spare runs    experts of this step that found no slot; the step's next layer overwrites them
    slots         so many for each layer: the experts that its last steps have chosen

In a step of few rows nobody asks the host: kernels bring what is missing (`kernels/experts/slots.py`), in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.experts.slot_tables import SlotTables
from nanoinfer.layers.experts import Experts

NUM_AREAS = 2


class SlotCounts(NamedTuple):
    """How many experts the steps of a layer have found in slots, brought to slots and to spare runs, and put out."""

    layer: int
    hits: int
    to_slots: int
    to_spare: int
    evictions: int
    stride: int


class SlotSet:
    """The pool of layers whose experts are runs of one length.

    Args:
        layers: the experts of these layers, in their order.
        num_slots: of each layer, at most one for each expert that a rank has.
        first_landing: number of the first area among the landing buffers; see `Landing`.

    Attributes:
        counts: [layers, 4] int64, see `SlotTables`.
    """

    def __init__(
        self, layers: Sequence[Experts], num_slots: int, device: torch.device | str, first_landing: int
    ) -> None:
        self.layers, self._first_landing = list(layers), first_landing
        self._num_experts, stride = layers[0].num_experts, layers[0].stride
        num_slots = min(num_slots, self._num_experts)
        num_runs = pool_runs(self._num_experts, num_slots, len(layers))
        self._pool = torch.zeros(num_runs, stride, dtype=torch.uint8, device=device)

        def numbers(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._of_step = dict(
            table=numbers(self._num_experts), fetches=numbers(1 + 2 * self._num_experts), victims=numbers(num_slots)
        )
        self.counts = torch.zeros(len(layers), 4, dtype=torch.int64, device=device)
        self._tables = [
            SlotTables(
                pool=self._pool,
                held=numbers(self._num_experts),
                owner=numbers(num_slots),
                used=numbers(num_slots, torch.int64),
                clock=numbers(1, torch.int64),
                counts=self.counts[index],
                first_slot=num_runs - (len(layers) - index) * num_slots,
                first_spare=NUM_AREAS * self._num_experts,
                **self._of_step,
            )
            for index in range(len(layers))
        ]
        for tables in self._tables:
            tables.forget()

    @property
    def areas(self) -> list[Tensor]:
        """[bytes] uint8 each."""
        size = self._num_experts
        return [self._pool[turn * size : (turn + 1) * size].view(-1) for turn in range(NUM_AREAS)]

    def fetched_bytes(self, counts: Sequence[Sequence[int]]) -> int:
        """Return the bytes of the experts that what `counts` was at a time says were brought one by one."""
        return sum(to_slots + to_spare for _, to_slots, to_spare, _ in counts) * self.layers[0].stride

    def landing_of(self, experts: Experts) -> int:
        """Return the number of the area to which the layer's experts go together, as a landing buffer."""
        return self._first_landing + self.layers.index(experts) % NUM_AREAS

    def area_of(self, experts: Experts) -> Tensor:
        """Return this area, [num_experts, stride] uint8."""
        return self.areas[self.layers.index(experts) % NUM_AREAS].view(self._num_experts, -1)

    def give(self, most_rows: int) -> None:
        """Have each layer find its experts in its area, and in steps of at most `most_rows` rows in its slots.

        Its table is that of an area which lies by itself.
        """
        for index, (experts, tables) in enumerate(zip(self.layers, self._tables, strict=True)):
            first = index % NUM_AREAS * self._num_experts
            experts.table.add_(first)
            experts.share(self._pool, experts.table, first)
            experts.slots, experts.most_rows = tables, most_rows


def slot_sets(owners: Sequence[Experts], num_slots: int, device: torch.device | str) -> list[SlotSet]:
    """Return the pools of these layers."""
    by_stride: dict[int, list[Experts]] = {}
    for one in owners:
        by_stride.setdefault(one.stride, []).append(one)
    return [SlotSet(layers, num_slots, device, NUM_AREAS * number) for number, layers in enumerate(by_stride.values())]


def pool_runs(num_experts: int, num_slots: int, num_layers: int) -> int:
    """Return how many runs a pool has: areas, spare runs for all experts that find no slot, and slots."""
    return NUM_AREAS * num_experts + (num_experts - num_slots) + num_layers * num_slots


def pool_bytes(strides: Sequence[int], num_experts: int, num_slots: int) -> int:
    """Return the bytes of the pools. strides: bytes of an expert in each sparse layer."""
    return sum(stride * pool_runs(num_experts, num_slots, strides.count(stride)) for stride in set(strides))
