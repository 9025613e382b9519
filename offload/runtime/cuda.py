"""The runtime on a CUDA device, and what pins memory for one: thin wrappers over torch.cuda."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.memory.near import processors_near
from offload.memory.pinned import Pinner
from offload.runtime.base import Event, Runtime, Stream, poison_of
from offload.runtime.link import Link

# Pinned for every context of the process, and mapped, so that kernels may read it.
_HOST_REGISTER = 1 | 2
_COPY_BYTES = 128 * 2**20


class CudaEvent(Event):
    def __init__(self, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)

    def query(self, rule: str | None) -> bool:
        return self.event.query()

    def synchronize(self, rule: str) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3


unused_streams: dict[tuple[torch.device, str], list[torch.cuda.Stream]] = {}
"""Streams of runtimes that are gone, by device and name.

Once graphs were captured on two streams of a process, the driver replays all graphs more slowly, and this lasts until
the process ends. So a runtime that follows another takes over its streams.
"""
taken_streams: set[int] = set()
"""Handles of all streams of runtimes, in use or not. Torch hands out the same 32 of a device again and again."""
_POOL_SIZE = 32


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no runtime has taken yet, as long as torch has one."""
    for _ in range(_POOL_SIZE):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken_streams:
            break
    taken_streams.add(stream.cuda_stream)
    return stream


class CudaStream(Stream):
    """A torch.cuda.Stream that skips the switch when it is the current one already.

    Attributes:
        give_back: leaves the stream to the next runtime, once. It is called at the latest when this object is freed.
    """

    def __init__(self, name: str, runtime: CudaRuntime) -> None:
        unused = unused_streams.setdefault((runtime.device, name), [])
        try:
            self.stream = unused.pop()
        except IndexError:
            self.stream = _new_stream(runtime.device)
        # Streams of runtimes that live at the same time are apart: a capture takes what any thread enqueues.
        self.give_back = weakref.finalize(self, unused.append, self.stream)
        self.give_back.atexit = False
        self._runtime = runtime

    def run(self, work: Callable[[], None]) -> None:
        if self._runtime.current_stream is self:
            work()
        else:
            with torch.cuda.stream(self.stream):
                work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.run(lambda: destination.copy_(source, non_blocking=True))

    def record(self, event: CudaEvent) -> None:
        event.event.record(self.stream)

    def wait(self, event: CudaEvent, rule: str) -> None:
        self.stream.wait_event(event.event)

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._runtime.current_stream
        self._runtime.current_stream = self
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self._runtime.current_stream = before


class CudaRuntime(Runtime):
    """Streams, events and graphs of one CUDA device; all graphs share one memory pool.

    Args:
        poison: fill released buffers with NaN, so that whoever still reads one gives a wrong answer. Slower; takes one
            more buffer of the size of a layer's KV block.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self.device, self.poisons = device, poison
        self.current_stream: CudaStream | None = None
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._nan: dict[tuple[CudaStream, torch.dtype], torch.Tensor] = {}
        self._streams: list[weakref.finalize] = []

    def stream(self, name: str) -> CudaStream:
        stream = CudaStream(name, self)
        self._streams.append(stream.give_back)
        return stream

    def close(self) -> None:
        for give_back in self._streams:
            give_back()

    def event(self, timed: bool = False) -> CudaEvent:
        return CudaEvent(timed)

    def capture(self, stream: CudaStream, work: Callable[[], None]) -> Callable[[], None]:
        stream.run(work)  # compiles kernels and creates library handles, which capture forbids
        stream.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that pins host memory calls the driver while graphs are captured, which the
        # default mode would count as a violation of this capture.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    @torch.inference_mode()  # released blocks may be reclaimed outside of a step
    def poison(self, stream: CudaStream, tensor: torch.Tensor) -> None:
        if not self.poisons:
            return
        assert tensor.is_floating_point() or tensor.dtype == torch.uint8, f"a {tensor.dtype} buffer cannot hold NaN"
        if tensor.is_cuda:
            stream.run(lambda: tensor.fill_(poison_of(tensor.dtype)))
        else:  # the CPU would fill it at once, beside copies that are still in flight
            stream.copy(tensor, self._nan_like(stream, tensor))

    def _nan_like(self, stream: CudaStream, tensor: torch.Tensor) -> torch.Tensor:
        """Return NaN in the shape of `tensor`, on the device. Each stream has its own buffer and needs no wait."""
        key = stream, tensor.dtype
        if key not in self._nan or self._nan[key].numel() < tensor.numel():
            with torch.cuda.stream(stream.stream):
                self._nan[key] = torch.full(
                    (tensor.numel(),), poison_of(tensor.dtype), dtype=tensor.dtype, device=self.device
                )
        return self._nan[key][: tensor.numel()].view(tensor.shape)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def link(self) -> Link:
        from offload.runtime.device_link import DeviceLink  # triton comes with CUDA builds of torch only

        return DeviceLink(self.device, has_instructions=torch.version.hip is None)


class CudaPinner(Pinner):
    """Registers memory with the driver."""

    def __init__(self, device: torch.device) -> None:
        # Threads that pin have a current device of their own.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def register(self, address: int, num_bytes: int) -> str | None:
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, num_bytes, _HOST_REGISTER))
        if code == 0:
            return None
        try:
            torch.zeros(1, device=self._device)  # a failed call leaves its error pending in this thread: this takes it
        except RuntimeError:
            pass
        return f"CUDA error {code}: {cudart.cudaGetErrorString(cudart.cudaError(code))}"

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def near(self) -> set[int] | None:
        gpu = torch.cuda.get_device_properties(self._device)
        numbers = [getattr(gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        return None if None in numbers else processors_near("{:04x}:{:02x}:{:02x}.0".format(*numbers))

    def copy_gbps(self, pinned: bool) -> float:
        """As in `Pinner`: the best of three copies of 128 MiB."""
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        # A stream of its own, and no wait for the device: another thread may be capturing a graph.
        stream = torch.cuda.Stream(self._device)
        best = float("inf")
        with torch.cuda.stream(stream):
            destination = torch.empty_like(source, device=self._device)
            for _ in range(4):  # the first one warms up
                stream.synchronize()
                begin = time.perf_counter()
                destination.copy_(source, non_blocking=True)
                stream.synchronize()
                best = min(best, time.perf_counter() - begin)
        return _COPY_BYTES / best / 1e9
