"""The parts of a sum that several ranks have, gathered, added to the residual and normed, in one kernel.

Each program takes a row: it writes this rank's part of it to all ranks, waits for theirs (`launch.exchange`), and goes
on as `rms_norm` does. So the bits are those of `rms_norm` over the gathered parts.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.exchange import MOST_LOOKS, Mailbox, end_exchange, memory_of, say_and_wait
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.rms_norm import normed, residual_sum, rounded


@triton.jit(do_not_specialize_on_alignment=["sum_scale"])
def exchange_norm_kernel(
    x,  # as of `rms_norm_kernel`, likewise the others
    own,  # [N, SIZE] float32, this rank's part
    weight,
    behind,
    sum_scale,
    out,
    memories,  # as of `gather_kernel`, likewise the others
    signals,
    counts,
    x_stride,
    slot_words,
    most_looks,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    FACTOR: tl.constexpr,
    FRESH: tl.constexpr,
    NORM_FACTOR: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if behind is not None:
        scale_of_other = tl.load(behind + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    number = tl.load(counts, volatile=True) + 1
    slot = (number & 1).to(tl.int64) * slot_words
    size = tl.num_programs(0) * SIZE
    part = tl.load(own + row * SIZE + columns, mask=inside, other=0.0)
    at = slot + row * SIZE + columns
    for step in tl.static_range(1, RANKS):
        memory = memory_of(memories, (RANK + step) % RANKS, tl.float32)
        tl.store(memory + RANK * size + at, part, mask=inside)
    if FRESH:
        value = tl.zeros([TILE], tl.float32)
    else:
        value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    say_and_wait(memories, signals, slot, number, most_looks, size, SIZE, RANK, RANKS, PROGRAMS, PTX)
    here = memory_of(memories, RANK, tl.float32)
    added = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            added += part
        else:
            added += tl.load(here + rank * size + at, mask=inside, other=0.0)
    added = rounded(added, x)
    if behind is not None:
        added = rounded(normed(added, scale_of_other, x, eps, SIZE, OFFSET, ROUNDS_ONCE), x)
    value = residual_sum(x, value, added, sum_scale, row, columns, inside, x_stride, FACTOR)
    if weight is not None:
        value = normed(value, scale, x, eps, SIZE, OFFSET, ROUNDS_ONCE)
        if NORM_FACTOR is not None:
            value = rounded(value, out) * NORM_FACTOR
        tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=inside)
    end_exchange(counts, number)


def exchange_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    own: Tensor,
    mailbox: Mailbox,
    *,
    offset: bool,
    rounds_once: bool = False,
    behind: Tensor | None = None,
    out: Tensor | None = None,
    factor: float | None = None,
    scale: Tensor | None = None,
    is_fresh: bool = False,
    norm_factor: float | None = None,
) -> Tensor:
    """Return what `rms_norm` does with the parts of all ranks as `other`. own: [N, size] float32, this rank's.

    N: at least 1 and at most `mailbox.most_rows(size)`.
    """
    num_rows, size = x.shape
    assert own.is_contiguous() and own.shape == x.shape and 0 < num_rows <= mailbox.most_rows(size)
    assert x.stride(1) == 1 and x.data_ptr() % 16 == 0 and own.data_ptr() % 16 == 0, "tensors must be aligned"
    if out is None and weight is not None:
        out = x.new_empty(num_rows, size)
    tile = next_power_of_2(size)
    exchange_norm_kernel[(num_rows,)](
        x, own, weight, behind, scale, out, *mailbox.addresses, x.stride(0), mailbox.slot_words, MOST_LOOKS, eps,
        SIZE=size, TILE=tile, OFFSET=offset, ROUNDS_ONCE=rounds_once, FACTOR=factor, FRESH=is_fresh,
        NORM_FACTOR=norm_factor, **mailbox.sizes, num_warps=min(16, max(1, tile // 256)), **launch_options(x),
    )  # fmt: skip
    return x if out is None else out
