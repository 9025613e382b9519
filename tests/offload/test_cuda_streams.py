"""Which streams the runtimes of CUDA take. No GPU is needed: their streams are stand-ins."""

import gc
from contextlib import contextmanager

import pytest
import torch

from offload.runtime.cuda import CudaRuntime


class Handle:
    """A stream of torch's pool, which hands out the same 32 of a device in turns."""

    num_drawn = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda_stream = device, 100 * device.index + Handle.num_drawn % 32
        Handle.num_drawn += 1

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    monkeypatch.setattr("torch.cuda.Stream", Handle)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
    monkeypatch.setattr("offload.runtime.cuda.unused_streams", {})
    monkeypatch.setattr("offload.runtime.cuda.taken_streams", set())


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_runtime_takes_over_the_streams_of_one_that_is_gone(is_closed):
    first = CudaRuntime(torch.device("cuda", 0))
    compute, copy = first.stream("compute"), first.stream("copy")
    handles = compute.stream, copy.stream
    if is_closed:
        first.close()  # what is left of it may live on until garbage is collected
        first.close()
    else:
        del first, compute, copy
        gc.collect()
    second = CudaRuntime(torch.device("cuda", 0))
    copies, computes = [second.stream("copy") for _ in range(2)], [second.stream("compute") for _ in range(2)]
    assert (computes[0].stream, copies[0].stream) == handles, "by name: graphs are captured on one stream again"
    assert len({stream.stream for stream in (*copies, *computes)}) == 4, "each is taken over once"


def test_runtimes_that_live_at_the_same_time_share_no_stream():
    """A capture would take what the other one enqueues."""
    first, second = CudaRuntime(torch.device("cuda", 0)), CudaRuntime(torch.device("cuda", 0))
    streams = [runtime.stream("compute") for runtime in (first, second, first)]
    assert len({stream.stream for stream in streams}) == 3


def test_streams_stay_on_their_device():
    first = CudaRuntime(torch.device("cuda", 0)).stream("compute").stream
    gc.collect()
    second = CudaRuntime(torch.device("cuda", 1)).stream("compute").stream
    assert first is not second and second.device.index == 1


@pytest.mark.parametrize("num_others", [0, 1, 6, 29, 30, 31, 32, 61])
def test_streams_differ_whatever_others_draw_from_the_pool(num_others):
    device, streams = torch.device("cuda", 0), []
    runtimes = [CudaRuntime(device) for _ in range(3)]
    for runtime in runtimes:
        streams += [runtime.stream(name) for name in ("compute", "copy", "write")]
        for _ in range(num_others):
            Handle(device)
    assert len({stream.stream.cuda_stream for stream in streams}) == 9


def test_more_streams_than_the_pool_has_share_some():
    runtime = CudaRuntime(torch.device("cuda", 0))
    streams = [runtime.stream("compute") for _ in range(40)]
    assert len({stream.stream.cuda_stream for stream in streams}) == 32


def test_a_graph_is_captured_and_replayed_on_its_stream_whichever_is_current(monkeypatch):
    """Torch captures and replays on the current stream."""
    current, captured, replayed = [None], [], []

    class Graph:
        def replay(self) -> None:
            replayed.append(current[-1])

    @contextmanager
    def entered(stream: Handle):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr("torch.cuda.stream", entered)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", lambda graph, *, pool, stream, capture_error_mode: entered(stream))
    runtime = CudaRuntime(torch.device("cuda", 0))
    compute, copy = runtime.stream("compute"), runtime.stream("copy")
    replay = runtime.capture(compute, lambda: captured.append(current[-1]))
    assert captured == [compute.stream] * 2, "once to compile, once to capture"
    compute.run(replay)
    with compute.current():
        compute.run(replay)
    with copy.current():
        compute.run(replay)
    assert replayed == [compute.stream] * 3 and len(captured) == 2
