"""Two sums that have norms of their own, added, normed once more and added to the residual, whose norm follows: what
stands behind a dense MLP and the experts beside it, in one kernel.

Where ranks have a part of each sum, both are exchanged at once (`launch.exchange`). Each step is rounded as `rms_norm`
rounds it, so the bits are those of three norms after each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.exchange import MOST_LOOKS, Mailbox, end_exchange, memory_of, say_and_wait
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.rms_norm import addend, normed, residual_sum, rounded


@triton.jit
def joined(
    x, value, one, two, scale_of_one, scale_of_two, scale_of_both, scale, sum_scale, out, row, columns, inside,
    x_stride, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_ONCE: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Go on with the two sums of a row, rounded. value: the row of x; scales: weights, as they are loaded."""
    one = rounded(normed(one, scale_of_one, x, eps, SIZE, OFFSET, ROUNDS_ONCE), x)
    two = rounded(normed(two, scale_of_two, x, eps, SIZE, OFFSET, ROUNDS_ONCE), x)
    both = rounded(0.0 + one + two, x)
    both = rounded(normed(both, scale_of_both, x, eps, SIZE, OFFSET, ROUNDS_ONCE), x)
    value = residual_sum(x, value, both, sum_scale, row, columns, inside, x_stride, None)
    if NORMS:
        value = normed(value, scale, x, eps, SIZE, OFFSET, ROUNDS_ONCE)
        tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["sum_scale"])
def joined_norm_kernel(
    x,  # [N, SIZE], rows x_stride apart; becomes (x + norm(norm(first) + norm(second))) * sum_scale
    first,  # [FIRST_SPLITS, N, SIZE] float32, whose sum has the first norm
    second,  # [SECOND_SPLITS, N, SIZE] float32, whose sum has the second
    weight,  # [SIZE], of the norm of what x becomes; None: there is none
    of_first,  # [SIZE], likewise the next two: the weights of the norms of `first`, `second` and what both give
    of_second,
    of_both,
    sum_scale,  # [1]; None: 1
    out,  # [N, SIZE]; None without `weight`
    x_stride,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET: tl.constexpr,  # as of `rms_norm_kernel`, likewise the next
    ROUNDS_ONCE: tl.constexpr,
    FIRST_SPLITS: tl.constexpr,
    SECOND_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    scale_of_one = tl.load(of_first + columns, mask=inside, other=0.0).to(tl.float32)
    scale_of_two = tl.load(of_second + columns, mask=inside, other=0.0).to(tl.float32)
    scale_of_both = tl.load(of_both + columns, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of_both
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    one = addend(x, first, row, columns, inside, 0, SIZE, FIRST_SPLITS)
    two = addend(x, second, row, columns, inside, 0, SIZE, SECOND_SPLITS)
    joined(
        x, value, one, two, scale_of_one, scale_of_two, scale_of_both, scale, sum_scale, out, row, columns, inside,
        x_stride, eps, SIZE, OFFSET, ROUNDS_ONCE, weight is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["sum_scale"])
def joined_exchange_kernel(
    x,  # as of `joined_norm_kernel`, likewise the others
    first,  # [N, SIZE] float32, this rank's part
    second,  # [N, SIZE] float32, likewise
    weight,
    of_first,
    of_second,
    of_both,
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
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    scale_of_one = tl.load(of_first + columns, mask=inside, other=0.0).to(tl.float32)
    scale_of_two = tl.load(of_second + columns, mask=inside, other=0.0).to(tl.float32)
    scale_of_both = tl.load(of_both + columns, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of_both
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    number = tl.load(counts, volatile=True) + 1
    slot = (number & 1).to(tl.int64) * slot_words
    size = tl.num_programs(0) * SIZE  # of each sum
    part_of_one = tl.load(first + row * SIZE + columns, mask=inside, other=0.0)
    part_of_two = tl.load(second + row * SIZE + columns, mask=inside, other=0.0)
    at = slot + row * SIZE + columns
    for step in tl.static_range(1, RANKS):
        memory = memory_of(memories, (RANK + step) % RANKS, tl.float32)
        tl.store(memory + RANK * 2 * size + at, part_of_one, mask=inside)
        tl.store(memory + (RANK * 2 + 1) * size + at, part_of_two, mask=inside)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    say_and_wait(memories, signals, slot, number, most_looks, 2 * size, SIZE, RANK, RANKS, PROGRAMS, PTX)
    here = memory_of(memories, RANK, tl.float32)
    one = tl.zeros([TILE], tl.float32)
    two = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            one += part_of_one
            two += part_of_two
        else:
            one += tl.load(here + rank * 2 * size + at, mask=inside, other=0.0)
            two += tl.load(here + (rank * 2 + 1) * size + at, mask=inside, other=0.0)
    joined(
        x, value, rounded(one, x), rounded(two, x), scale_of_one, scale_of_two, scale_of_both, scale, sum_scale, out,
        row, columns, inside, x_stride, eps, SIZE, OFFSET, ROUNDS_ONCE, weight is not None,
    )  # fmt: skip
    end_exchange(counts, number)


def joined_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    first: Tensor,
    second: Tensor,
    behind: tuple[Tensor, Tensor, Tensor],
    *,
    offset: bool,
    rounds_once: bool = False,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    mailbox: Mailbox | None = None,
) -> Tensor:
    """Return the norm of x, in `out` if that is given; x becomes (x + norm(norm(first) + norm(second))) * scale first.

    x: [N, size], rows at any stride, changed in place; weight: [size], None: x itself is returned. first, second: the
    parts of two sums, [parts, N, size] float32, packed, which are added in order and rounded. behind: the weights of
    the norms of the first, the second, and what these give together. offset, rounds_once, scale: as in `rms_norm`.
    mailbox: of ranks, of which each gives its part of both sums as first and second, [N, size] float32; N is at most
    `mailbox.most_rows(2 * size)`.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1 and first.is_contiguous() and second.is_contiguous(), "values of a row must be packed"
    assert all(one.data_ptr() % 16 == 0 for one in (x, first, second)), "tensors must be aligned"
    if out is None and weight is not None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    tile = next_power_of_2(size)
    how = dict(SIZE=size, TILE=tile, OFFSET=offset, ROUNDS_ONCE=rounds_once, num_warps=min(16, max(1, tile // 256)))
    given = (x, first, second, weight, *behind, scale, out)
    if mailbox is not None:
        assert first.shape == second.shape == x.shape and 0 < num_rows <= mailbox.most_rows(2 * size)
        joined_exchange_kernel[(num_rows,)](
            *given, *mailbox.addresses, x.stride(0), mailbox.slot_words, MOST_LOOKS, eps, **how, **mailbox.sizes,
            **launch_options(x),
        )  # fmt: skip
    elif num_rows:
        splits = dict(FIRST_SPLITS=len(first), SECOND_SPLITS=len(second))
        joined_norm_kernel[(num_rows,)](*given, x.stride(0), eps, **how, **splits, **launch_options(x))
    return x if out is None else out
