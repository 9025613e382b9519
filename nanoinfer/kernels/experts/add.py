"""What a row's experts give, added in two sums."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.choose import count_read
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2


@triton.jit
def add_experts_kernel(
    products,  # [N * CHOSEN, width] float32
    ids,  # [N, CHOSEN]
    weights,  # [N, CHOSEN] float32
    table,  # [EXPERTS]
    shared,  # [2, N, SIZE] float32, added last; None: none
    shared_gate,  # [N], whose sigmoid `shared` is multiplied by; None: it is added as it is
    gate_stride,  # from one row's to the next
    out,  # [2, N, SIZE] float32
    experts_read,  # [1] int64, more by how many experts a single row has here; None: not counted
    first_column,  # of out, that column 0 of `products` belongs to
    width,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    FIRST_HALF: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if experts_read is not None:
        if tl.program_id(1) == 0:
            own = tl.load(ids + tl.arange(0, CHOSEN_TILE), mask=tl.arange(0, CHOSEN_TILE) < CHOSEN, other=-1)
            indices = tl.load(table + own, mask=own >= 0, other=-1)
            count_read(experts_read, tl.sum((indices >= 0).to(tl.int32)))
    first = tl.zeros([TILE], tl.float32)
    second = tl.zeros([TILE], tl.float32)
    for index in tl.static_range(CHOSEN):
        pair = row * CHOSEN + index
        expert = tl.load(ids + pair)
        # Of an expert that is not chosen, or not here, nothing is read or added.
        is_here = tl.minimum(expert, tl.load(table + tl.maximum(expert, 0))) + 0 * column >= 0
        counts = inside & is_here
        product = tl.load(products + pair * width + column, mask=counts, other=0.0) * tl.load(weights + pair)
        first = tl.where(counts & (expert < FIRST_HALF), first + product, first)
        second = tl.where(counts & (expert >= FIRST_HALF), second + product, second)
    at = row * SIZE + first_column + column
    other = tl.num_programs(0).to(tl.int64) * SIZE
    if shared is not None:
        of_first = tl.load(shared + at, mask=inside, other=0.0)
        of_second = tl.load(shared + other + at, mask=inside, other=0.0)
        if shared_gate is not None:
            gate = tl.sigmoid(tl.load(shared_gate + row * gate_stride).to(tl.float32))
            gate = gate.to(shared_gate.dtype.element_ty).to(tl.float32)
            of_first *= gate
            of_second *= gate
        first += of_first
        second += of_second
    tl.store(out + at, first, mask=inside)
    tl.store(out + other + at, second, mask=inside)


def add_experts(
    products: Tensor,
    ids: Tensor,
    weights: Tensor,
    table: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out: Tensor,
    first_column: int,
    first_half: int,
    experts_read: Tensor | None,
) -> None:
    """Write the columns of `out` from `first_column` on, [2, N, width] float32, for `product.expert_mlp`.

    products: [N * num_chosen, width] float32.
    """
    (num_rows, num_chosen), width = ids.shape, products.shape[1]
    tile = min(1024, next_power_of_2(width))
    add_experts_kernel[(num_rows, triton.cdiv(width, tile))](  # only the first size may exceed 65,535
        products, ids, weights, table, shared, shared_gate, 0 if shared_gate is None else shared_gate.stride(0), out,
        experts_read, first_column, width, SIZE=out.shape[-1],
        CHOSEN=num_chosen, CHOSEN_TILE=next_power_of_2(num_chosen), FIRST_HALF=first_half, TILE=tile,
        num_warps=max(1, tile // 256),
        **launch_options(products, fuses=False),
    )  # fmt: skip
