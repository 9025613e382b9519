"""Programmatic dependent launch: on Hopper and later a kernel starts while the one before it still runs.

Before `wait_for_inputs` returns, a kernel may read weights and data written before the previous kernel began its own
wait: tables that the host uploaded, and what a step's first kernels wrote. It may write nothing. After
`wait_for_inputs`, all previous kernels are complete, because each of them waits, too.

The next kernel starts once every program has called `let_next_in`. No program calls it before its own wait, so at most
two kernels run at once. The begin of a graph lets nothing start early: what follows it starts when everything before it
is complete. A copy is no such barrier: attention over a ring slot, launched behind the copy of its own list, sometimes
had other bits on an H200 that other processes used too, and not without an early start. So a kernel that reads before
its wait what a copy has written last is launched without one (`after_copy`). `tests/kernels/test_early_reads.py` holds
each of these rules, over the steps of whole engines: no launch has to say what it reads early.

Short kernels call `let_next_in` right after their wait, but for one whose programs would crowd the next one's: see
`merge.merge_launch`. Kernels that stream weights call it after their loops: when they called it earlier, programs of
the next kernel took the cores that their own last programs were waiting for, and an H200 lost 0.3 ms of a 2.7 ms step.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from nanoinfer.devices.registry import target_of


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all previous kernels are complete."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def ask_for(pointers):
    """Have lines at these addresses read into the L2 cache, before `wait_for_inputs`: weights only.

    A few lines of each program: more come too late, and hold up the loads behind them. An H200's step of 1 to 8 rows
    takes 1% (4 bits) to 2% (16 bits) less with the first two lines of each row of a weight, and more with eight. It
    takes 1% to 10% more if the kernels before a product ask for all of its weight, or for some MiB of it.
    """
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_in(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have called this or ended."""
    if PDL:
        cuda.gdc_launch_dependents()


def launch_options(x: Tensor, *, fuses: bool = True, after_copy: bool = False) -> dict[str, bool]:
    """Return the launch's PDL arguments: PDL tells the kernel, launch_pdl the driver. x: any tensor of the launch.

    fuses: whether the compiler may fuse products and sums. Each launch says so, because triton's versions have other
    defaults, and the bits depend on it. after_copy: whether the kernel reads, before its wait, what a copy has written
    that is enqueued right before it.
    """
    if target_of(x.device).has_dependent_launches and not after_copy:
        return {"PDL": True, "launch_pdl": True, "enable_fp_fusion": fuses}
    return {"PDL": False, "enable_fp_fusion": fuses}  # where there are none, the compiler may not know the option
