"""What the programs of one engine share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanoinfer.attention.base import AttentionBackend, Backends
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.devices.registry import device_of
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.pieces import Pieces
from nanoinfer.execution.states import States
from nanoinfer.kernels.kv.base import KVPart
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.pieces import DeviceState
from nanoinfer.step.memory_plan import MemoryPlan
from offload import KVGroups, KVLayout, LandingBuffers, Ring, Runtime, Stream


@dataclass(frozen=True)
class Resources:
    """The resources of one engine with which steps are carried out. Layers without attention do not count.

    Attributes:
        landing_buffers: where transfers lie that do not pass through the ring.
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool, once memory was measured.
        states: what rows keep besides blocks.
        groups: the layers whose keys and values share blocks.
        group_of: layer -> number of the group whose blocks it reads.
        table_width: columns of a row's block table in each group.
    """

    config: EngineConfig
    memory_plan: MemoryPlan
    runtime: Runtime
    compute: Stream
    model: Decoder
    backends: Backends
    layout: KVLayout
    ring: Ring
    landing_buffers: LandingBuffers
    graphs: Graphs
    gpu_kv: torch.Tensor | None = None
    states: States | None = None

    @property
    def device(self) -> Device:
        return device_of(self.runtime.device)

    @cached_property
    def pieces(self) -> Pieces:
        groups = () if self.gpu_kv is None else range(len(self.groups))
        gpu_kv = [[self.kv_at(group, place) for place in range(self.layout.num_places)] for group in groups]
        return Pieces(self.model, DeviceState(gpu_kv, self.states.of_layer), self.memory_plan.slot_rows)

    def kv_at(self, group: int, place: int) -> torch.Tensor:
        """Return a place of all blocks of the GPU pool, as the layers of this group read it."""
        return self._part(group).view(self.gpu_kv[place])

    def slot_of(self, group: int, ring_slot: int) -> torch.Tensor:
        """Return the blocks of a ring slot, as the layers of this group read them."""
        return self._part(group).view(self.ring.slots[ring_slot])

    def _part(self, group: int) -> KVPart:
        return self.model.spec.attentions[self.groups[group].shape].part

    @property
    def backend_of_group(self) -> list[AttentionBackend]:
        return [self.backends[group.shape] for group in self.groups]

    @property
    def groups(self) -> KVGroups:
        return self.model.spec.kv_groups

    @property
    def group_of(self) -> list[int]:
        return self.pieces.group_of

    @property
    def table_width(self) -> int:
        return self.groups.table_width(self.memory_plan.max_model_len)
