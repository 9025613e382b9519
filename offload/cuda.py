"""The runtime on a CUDA device: thin wrappers over torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.runtime import Event, Graph, Runtime, Stream


class CudaEvent(Event):
    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def query(self, rule: str) -> bool:
        return self.event.query()

    def synchronize(self, rule: str) -> None:
        self.event.synchronize()


class CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph


class CudaStream(Stream):
    """A torch.cuda.Stream that skips the switch when it is the current one already."""

    def __init__(self, name: str, runtime: CudaRuntime) -> None:
        self.name = name
        self.stream = torch.cuda.Stream(runtime.device)
        self._runtime = runtime

    def run(self, work: Callable[[], None]) -> None:
        if self._runtime.current_stream is self:
            work()
        else:
            with torch.cuda.stream(self.stream):
                work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.run(lambda: destination.copy_(source, non_blocking=True))

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        self.run(graph.graph.replay)

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)

    def wait(self, event: Event, rule: str) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

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
    """Streams, events and graphs of one CUDA device; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.poisons = False
        self.current_stream: CudaStream | None = None
        self._graph_pool = torch.cuda.graph_pool_handle()

    def stream(self, name: str) -> CudaStream:
        return CudaStream(name, self)

    def event(self) -> CudaEvent:
        return CudaEvent()

    def capture(self, stream: Stream, work: Callable[[], None]) -> CudaGraph:
        assert isinstance(stream, CudaStream)
        stream.run(work)  # compiles kernels and creates library handles, which capture forbids
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that pins host memory calls the driver while graphs are captured, which the
        # default mode would count as a violation of this capture.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream.stream, capture_error_mode="thread_local"):
            work()
        return CudaGraph(graph)

    def staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
