"""Programmatic dependent launch: on Hopper and later a kernel starts while the one before it still runs.

Until `wait_for_inputs` returns, a kernel may read weights and what was written before the kernel in front of it began
to wait itself: tables that the host uploaded, what a step's first kernels wrote. After it, all kernels before it are
complete, because each of them waits, too. Nothing may be written before it. The next kernel is let in once every
program has called `let_next_in`, which none does before its own wait, so two kernels at most run at once. A copy, or
the begin of a graph, lets nothing in early: what comes behind it starts when all before is complete.

Short kernels let the next one in as soon as they have waited. Kernels that stream weights do so behind their loops: let
in earlier, the next kernel's programs took the places of their last ones, and an H200 lost 0.3 ms of a 2.7 ms step.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

MIN_CAPABILITY = (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits for the kernels before this one."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def let_next_in(PDL: tl.constexpr):
    """Has the next kernel launched, once all programs have come here or ended."""
    if PDL:
        cuda.gdc_launch_dependents()


def launch_options(x: Tensor) -> dict[str, bool]:
    """The launch's arguments: PDL tells the kernel, launch_pdl the driver. x: any tensor of the launch."""
    enabled = x.is_cuda and _has_pdl(x.device)
    return {"PDL": enabled, "launch_pdl": enabled}


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
