"""What the programs of one engine share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.config import EngineConfig
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.recurrent import RecurrentStates
from nanoinfer.execution.segments import Segments
from nanoinfer.memory.plan import MemoryPlan
from nanoinfer.models.decoder import Decoder
from offload import KVLayout, Ring, Runtime, Stream


@dataclass(frozen=True)
class Resources:
    """The resources of one engine with which steps are carried out. Layers without attention do not count.

    Attributes:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        states: what rows keep besides blocks.
        windows: the distinct windows of layers; None: full attention.
        kind: layer -> index into `windows`.
    """

    config: EngineConfig
    plan: MemoryPlan
    runtime: Runtime
    compute: Stream
    model: Decoder
    backend: AttentionBackend
    layout: KVLayout
    ring: Ring
    gpu_kv: torch.Tensor
    states: RecurrentStates
    graphs: Graphs

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.model, self.gpu_kv, self.states)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        return self.model.spec.attention.windows

    @cached_property
    def kind(self) -> list[int]:
        return [self.windows.index(window) for window in self.model.spec.windows]

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.plan.max_model_len // self.layout.block_size)
