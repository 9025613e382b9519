"""An emulated link with a real driver: copies take their bytes over its rate, and bring the same bits."""

import pytest
import torch

from offload import CudaRuntime
from offload.runtime.throttle import throttled

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RATE = 5e9  # below what any link here has
MIB = 2**20


@pytest.fixture
def runtime():
    runtime = CudaRuntime(torch.device("cuda", 0))
    yield runtime
    runtime.synchronize()
    runtime.close()


def host(num_bytes: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8).pin_memory()


def seconds_of(runtime: CudaRuntime, stream, copies) -> float:
    """Between the begin of the first copy and the end of the last one, as events on the stream see them."""
    begin, end = runtime.event(timed=True), runtime.event(timed=True)
    stream.record(begin)
    for destination, source in copies:
        stream.copy(destination, source)
    stream.record(end)
    end.synchronize("a test")
    return end.seconds_since(begin)


@pytest.mark.parametrize("num_copies, num_bytes", [(1, 64 * MIB), (4, 16 * MIB), (64, MIB), (64, MIB + 4)])
def test_copies_take_their_bytes_over_the_rate_and_bring_the_same_bits(runtime, num_copies, num_bytes):
    stream = throttled(runtime.stream("copy"), RATE, runtime.link())
    runtime.synchronize()
    sources = [host(num_bytes) for _ in range(num_copies)]
    targets = torch.zeros(num_copies, num_bytes, dtype=torch.uint8, device="cuda")
    seconds = seconds_of(runtime, stream, zip(targets, sources, strict=True))
    assert torch.equal(targets.cpu(), torch.stack(sources))
    assert seconds == pytest.approx(num_copies * num_bytes / RATE, rel=0.1)


def test_both_directions_at_once_take_no_longer_than_one(runtime):
    there, back = (throttled(runtime.stream(name), RATE, runtime.link()) for name in ("copy", "write"))
    runtime.synchronize()
    sent, received = host(64 * MIB), torch.empty(64 * MIB, dtype=torch.uint8).pin_memory()
    on_gpu, sent_back = torch.zeros_like(sent, device="cuda"), sent.cuda()
    runtime.synchronize()
    begin, ends = runtime.event(timed=True), [runtime.event(timed=True) for _ in range(2)]
    there.record(begin)
    there.copy(on_gpu, sent)
    back.copy(received, sent_back)
    for stream, end in zip((there, back), ends, strict=True):
        stream.record(end)
    assert not any(end.query(None) for end in ends), "the host waited"
    for end in ends:
        end.synchronize("a test")
        assert end.seconds_since(begin) == pytest.approx(64 * MIB / RATE, rel=0.1)
    assert torch.equal(on_gpu.cpu(), sent) and torch.equal(received, sent)


def test_other_work_runs_while_a_copy_waits(runtime):
    stream, compute = throttled(runtime.stream("copy"), RATE, runtime.link()), runtime.stream("compute")
    runtime.synchronize()
    copied, computed = runtime.event(), runtime.event()
    source, target = host(256 * MIB), torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    x = torch.ones(1024, 1024, device="cuda")
    compute.run(lambda: x.matmul(x))  # makes what the library needs
    runtime.synchronize()
    stream.copy(target, source)
    stream.record(copied)
    compute.run(lambda: x.matmul(x))
    compute.record(computed)
    computed.synchronize("a test")
    assert not copied.query(None), "53 ms of the link, of which the product took some microseconds"
