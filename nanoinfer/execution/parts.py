"""What the programs of one engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.recurrent import RecurrentStates
from nanoinfer.execution.segments import Segments
from nanoinfer.models.decoder import Decoder
from offload import KVLayout, Ring, Runtime, Stream


@dataclass(frozen=True)
class Parts:
    """The parts of one engine with which steps are carried out.

    Attributes:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool. Layers without
            attention do not count.
        states: what rows keep besides blocks.
    """

    runtime: Runtime
    compute: Stream
    model: Decoder
    backend: AttentionBackend
    layout: KVLayout
    ring: Ring
    gpu_kv: torch.Tensor
    states: RecurrentStates
    segments: Segments
    graphs: Graphs
