"""The host arena with a real driver: pinned, exact, and given back."""

import time

import pytest
import torch

from nanoinfer.execution.runner import DEMAND_BYTES
from offload.memory.pinned import HostArena
from offload.runtime.cuda import CudaPinner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
PINNER = CudaPinner(torch.device("cuda", 0))


@pytest.mark.alone
def test_segments_are_pinned_and_copy_asynchronously():
    with HostArena(4, 64 * MIB, pinner=PINNER) as arena:
        arena.wait(1)
        assert arena.segment(0).is_pinned()
        arena.wait()
        assert arena.pinned_bytes == arena.mapped_bytes == 4 * 64 * MIB and arena.unpinned_bytes == 0
        destination = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        source = arena.segment(3)
        source.fill_(7)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # the copy has to wait behind this; the host must not
        begin = time.perf_counter()
        destination.copy_(source, non_blocking=True)
        assert time.perf_counter() - begin < 0.02, "the copy blocked the host"
        torch.cuda.synchronize()
        assert bool((destination == 7).all())


def test_odd_sizes_are_mapped_to_the_page_and_no_further():
    with HostArena(3, 5 * MIB + 1, pinner=PINNER) as arena:
        arena.wait()
        assert arena.mapped_bytes == 3 * (5 * MIB + 4096)
        assert arena.segment(2).numel() == 5 * MIB + 1 and arena.segment(2).is_pinned()


def test_memory_can_be_pinned_again_after_close():
    for _ in range(3):
        arena = HostArena(2, 32 * MIB, pinner=PINNER)
        arena.wait()
        arena.close()


def test_pinned_copies_are_faster_than_pageable_ones():
    assert PINNER.copy_gbps(pinned=True) > PINNER.copy_gbps(pinned=False)


def test_a_refusal_states_both_speeds_and_pageable_segments_work():
    """As on a system that allows little pinned memory: the fallback is slower, and as correct."""
    calls = []

    class Refusing(CudaPinner):
        def register(self, address: int, num_bytes: int) -> str:
            calls.append(address)
            return "out of memory"

    with pytest.warns(UserWarning, match=r"refused to pin .* which stream at [\d.]+ GB/s instead of [\d.]+"):
        arena = HostArena(2, 16 * MIB, pinner=Refusing(torch.device("cuda", 0)))
        arena.wait()
        arena._thread.join()
    assert len(calls) <= HostArena.num_register_threads and not arena.segment(0).is_pinned()
    arena.segment(1).fill_(3)
    assert bool((arena.segment(1).to("cuda", non_blocking=True) == 3).all())
    arena.close()


@pytest.mark.alone
def test_a_step_hardly_waits_while_memory_is_pinned_on_demand():
    """The driver takes one call at a time: a kernel that is launched waits until a segment is registered."""
    x, stream, longest = torch.zeros(1024, device="cuda"), torch.cuda.Stream(), {}
    x.add_(1)  # loads the kernel
    for num_bytes, num_rows in ((1024 * MIB, 1), (DEMAND_BYTES, 1), (DEMAND_BYTES, 32)):
        with (
            HostArena(2**32 // num_bytes, num_bytes, pinner=PINNER, on_demand=True, num_rows=num_rows) as arena,
            torch.cuda.stream(stream),
        ):
            arena.want(arena.num_segments)
            worst = 0.0
            while arena.num_ready < arena.num_segments:
                begin = time.perf_counter()
                x.add_(1)
                stream.synchronize()
                worst = max(worst, time.perf_counter() - begin)
            longest[f"{num_bytes // MIB} MiB in {num_rows} rows"] = worst
            rows = arena.segment(0).chunk(num_rows)
            for row in rows:  # none is refused
                row.copy_(torch.full_like(row, 7, device="cuda"), non_blocking=True)
            stream.synchronize()
            assert all(bool((row == 7).all()) for row in rows)
    print("; ".join(f"{name}: {seconds * 1e3:.1f} ms" for name, seconds in longest.items()))
    assert worst < 0.01
