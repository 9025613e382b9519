"""The host arena with a real driver: pinned, exact, and given back."""

import time

import pytest
import torch

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
