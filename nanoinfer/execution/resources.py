"""What the programs of one engine share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.devices.registry import device_of
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.memory_plan import MemoryPlan
from nanoinfer.execution.pieces import Pieces
from nanoinfer.execution.recurrent import RecurrentStates
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.pieces import Held
from offload import KVGroups, KVLayout, Places, Ring, Runtime, Stream


@dataclass(frozen=True)
class Resources:
    """The resources of one engine with which steps are carried out. Layers without attention do not count.

    Attributes:
        landings: where transfers lie that do not pass through the ring.
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool, once memory was measured.
        states: what rows keep besides blocks.
        groups: the layers whose keys and values share blocks.
        group_of: layer -> number of the group whose blocks it reads.
        table_width: columns of a row's block table in each group.
    """

    config: EngineConfig
    plan: MemoryPlan
    runtime: Runtime
    compute: Stream
    model: Decoder
    backend: AttentionBackend
    layout: KVLayout
    ring: Ring
    landings: Places
    graphs: Graphs
    gpu_kv: torch.Tensor | None = None
    states: RecurrentStates | None = None

    @property
    def device(self) -> Device:
        return device_of(self.runtime.device)

    @cached_property
    def pieces(self) -> Pieces:
        held = Held(self.kv_of_place, self.states.of_layer)
        return Pieces(self.model, held, self.plan.slot_rows)

    @property
    def kv_of_place(self) -> torch.Tensor | None:
        """The GPU pool as those read it who compute: a place of all blocks at its index."""
        return None if self.gpu_kv is None else self.model.spec.attention.part.view(self.gpu_kv)

    @property
    def kv_of_slot(self) -> torch.Tensor:
        """The ring as those read it who compute: a slot's blocks at its index."""
        return self.model.spec.attention.part.view(self.ring.slots)

    @property
    def groups(self) -> KVGroups:
        return self.model.spec.kv_groups

    @property
    def group_of(self) -> list[int]:
        return self.pieces.group_of

    @property
    def table_width(self) -> int:
        return self.groups.table_width(self.plan.max_model_len)
