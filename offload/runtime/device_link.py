"""A link of a GPU, on which time passes in a kernel behind each copy: one program, which looks at the GPU's clock."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda, hip

from offload.runtime.link import SLACK_NS, Link


class DeviceLink(Link):
    """A link on which a kernel waits, on the current stream.

    has_instructions: whether the kernel may be made of PTX.
    """

    def __init__(self, device: torch.device, *, has_instructions: bool) -> None:
        self._constants = dict(HAS_INSTRUCTIONS=has_instructions, num_warps=1, enable_fp_fusion=False)
        self._times = torch.zeros(2, dtype=torch.int64, device=device)

    def begin(self) -> None:
        begin_kernel[(1,)](self._times, SLACK_NS, **self._constants)

    def end(self, nanoseconds: int) -> None:
        end_kernel[(1,)](self._times, nanoseconds, **self._constants)


@triton.jit
def clock(HAS_INSTRUCTIONS: tl.constexpr):
    """The GPU's time in nanoseconds."""
    if HAS_INSTRUCTIONS:
        return cuda.globaltimer()
    else:
        return hip.memrealtime() * 10


@triton.jit
def begin_kernel(times, SLACK: tl.constexpr, HAS_INSTRUCTIONS: tl.constexpr):
    """times: [2] int64, when the link is free, and when the newest copy began on it; in the GPU's nanoseconds."""
    now, free = clock(HAS_INSTRUCTIONS), tl.load(times)
    tl.store(times + 1, tl.where(now - free > SLACK, now, free))


@triton.jit(do_not_specialize=["nanoseconds"])
def end_kernel(times, nanoseconds, HAS_INSTRUCTIONS: tl.constexpr):
    """Sleep until the newest copy has taken so long on the link. times: as in `begin_kernel`."""
    free = tl.load(times + 1) + nanoseconds
    now = clock(HAS_INSTRUCTIONS)
    while now < free:
        # This clock goes on in steps of 32 ns to 1 us, which add up to nothing: what is kept is when the link is free.
        if HAS_INSTRUCTIONS:
            now = tl.inline_asm_elementwise(
                "nanosleep.u32 200; mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
            )
        else:
            now = clock(HAS_INSTRUCTIONS)
    tl.store(times, free)
