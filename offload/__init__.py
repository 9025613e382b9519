"""KV blocks on the GPU and on the host, and the ring that streams them: bytes, chunks, slots, streams and events.

This package does not know what a model is. `OffloadEngine` runs a step that somebody else describes.
"""

from offload.blocks import BlockPool
from offload.cuda import CudaRuntime
from offload.engine import OffloadCounters, OffloadEngine, OffloadStep
from offload.host_pool import HostPool
from offload.layout import KVLayout
from offload.plan import Chunk, StreamPlan, pack, pack_together
from offload.residency import Residency
from offload.ring import Ring, ring_schedule
from offload.runtime import Event, Graph, Runtime, Stream
from offload.simulated import RaceError, SimulatedRuntime
from offload.staging import Staging
from offload.timeline import NoTimeline, Span, StepTimes, Timeline

__all__ = [
    "BlockPool",
    "Chunk",
    "CudaRuntime",
    "Event",
    "Graph",
    "HostPool",
    "KVLayout",
    "NoTimeline",
    "OffloadCounters",
    "OffloadEngine",
    "OffloadStep",
    "RaceError",
    "Residency",
    "Ring",
    "Runtime",
    "SimulatedRuntime",
    "Span",
    "Staging",
    "StepTimes",
    "Stream",
    "StreamPlan",
    "Timeline",
    "pack",
    "pack_together",
    "ring_schedule",
]
