"""What the device knows of a layer's slots. Nothing here needs triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False, kw_only=True)
class SlotTables:
    """A layer whose experts lie in host memory, some of them also in slots: runs of a pool that the layer keeps.

    Attributes:
        pool: [runs, stride] uint8, of all layers whose runs are of one length.
        home: [num_experts, stride] uint8, the layer's experts in host memory, which the device can read; None: they
            are not there yet.
        held: [num_experts] int32, the index in the pool of an expert that lies in a slot; -1: it does not.
        owner: [slots] int32, the expert in each slot; -1: none.
        used: [slots] int64, the last of the layer's steps that read what lies in the slot; 0: none.
        clock: [1] int64, the number of the layer's steps.
        counts: [4] int64, how many experts its steps have found in slots, brought to slots, brought to spare runs,
            and put out of a slot for another.
        first_slot, first_spare: indices of the layer's first slot, and of the first spare run, which all layers share.
        table, fetches, victims: of one step, for all layers of the pool. [num_experts] int32, each chosen expert's
            index; [1 + 2 * num_experts] int32, how many experts are missing, then each one and its index; [slots].
    """

    pool: Tensor
    home: Tensor | None = None
    held: Tensor
    owner: Tensor
    used: Tensor
    clock: Tensor
    counts: Tensor
    first_slot: int
    first_spare: int
    table: Tensor
    fetches: Tensor
    victims: Tensor

    @property
    def stride(self) -> int:
        return self.pool.shape[1]

    @property
    def pool_words(self) -> Tensor:
        return self.pool.view(-1).view(torch.int64)

    @property
    def home_words(self) -> Tensor:
        return self.home.view(-1).view(torch.int64)

    def forget(self) -> None:
        """Have nothing in the slots, on the current stream; what was counted stays."""
        self.held.fill_(-1)
        self.owner.fill_(-1)
        self.used.zero_()
        self.clock.zero_()
