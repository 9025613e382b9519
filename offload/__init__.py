"""KV blocks on the GPU and on the host, and the ring that streams them: bytes, chunks, slots, streams and events.

This package does not know what a model is. `OffloadEngine` runs a step that its caller describes.
"""

from offload.blocks import BlockPool
from offload.engine import OffloadCounters, OffloadEngine, OffloadStep
from offload.groups import KVGroup, KVGroups, KVKind
from offload.host_blocks import HostBlocks
from offload.layout import KVLayout
from offload.lifetimes import BlockLifetimes
from offload.memory.host_pool import HostPool
from offload.plan import Chunk, Cut, KVPlace, Landing, Need, StreamPlan, Transfer, pack, pack_together
from offload.ring import LandingBuffers, Ring, ring_schedule
from offload.runtime.base import Event, Runtime, Stream
from offload.runtime.cpu import CpuRuntime
from offload.runtime.cuda import CudaRuntime
from offload.runtime.staging import Staging
from offload.runtime.timeline import NoTimeline, Span, Timeline
