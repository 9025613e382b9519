"""Which experts a row takes, with which weights; and the pairs of row and expert in the order of the experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, Routing
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.launch.sizes import next_power_of_2

PAIRS_AT_ONCE = 4096


@triton.jit
def best(key, expert, is_open):
    """Return the number of the best key among the open ones, the lowest of equals. A NaN counts as the least."""
    key = tl.where(is_open & (key == key), key, float("-inf"))
    return tl.min(tl.where(is_open & (key == tl.max(key)), expert, 2**30))


@triton.jit
def choose_experts_kernel(
    logits,  # [N, WIDTH], of which those of experts are the first
    bias,  # [EXPERTS] float32, counts for the choice alone; None: none
    num_live,  # [1] int32
    ids,  # [N, CHOSEN] int32
    weights,  # [N, CHOSEN] float32
    like,  # a pointer to the model's dtype
    factors,  # [EXPERTS] in that dtype, on the weight of each expert; None: none
    factor,
    least,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,  # 0: softmax, 1: sigmoid, 2: softmax of the chosen ones
    NORMED: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROUNDS_SCORES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    FIRST: tl.constexpr,  # of the experts that are here
    END: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, TILE)
    inside = expert < EXPERTS
    turn = tl.arange(0, CHOSEN_TILE)
    own = row.to(tl.int64) * CHOSEN + turn
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if row >= tl.load(num_live):
        tl.store(ids + own, -1, mask=turn < CHOSEN)
        tl.store(weights + own, 0.0, mask=turn < CHOSEN)
        return
    value = tl.load(logits + row.to(tl.int64) * WIDTH + expert, mask=inside, other=float("-inf")).to(tl.float32)
    key = value
    score = value
    if SCORES == 0:
        score = tl.exp(value - tl.max(value))
        score = tl.div_rn(score, tl.broadcast_to(tl.sum(score), score.shape))
    elif SCORES == 1:
        score = tl.sigmoid(value)
        if ROUNDS_SCORES:
            score = score.to(like.dtype.element_ty).to(tl.float32)
        key = score
        if bias is not None:
            key += tl.load(bias + expert, mask=inside, other=0.0)
    is_open = inside
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        of_group = tl.full([TILE], float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            is_own = inside & (expert // SIZE == group)
            first = best(key, expert, is_own)
            second = best(key, expert, is_own & (expert != first))
            both = tl.sum(tl.where(expert == first, key, 0.0)) + tl.sum(tl.where(expert == second, key, 0.0))
            of_group = tl.where(expert == group, both, of_group)
        is_open = expert < 0
        is_group = expert < GROUPS
        for _ in tl.static_range(CHOSEN_GROUPS):
            group = best(of_group, expert, is_group)
            is_group = is_group & (expert != group)
            is_open = is_open | (inside & (expert // SIZE == group))
    chosen = tl.full([CHOSEN_TILE], -1, tl.int32)
    weight = tl.full([CHOSEN_TILE], 0.0, tl.float32)
    total = 0.0
    first_value = 0.0
    for index in tl.static_range(CHOSEN):
        number = best(key, expert, is_open)
        is_open = is_open & (expert != number)
        # A sum over one element: the value itself, also if it is NaN.
        own_score = tl.sum(tl.where(expert == number, score, 0.0))
        if SCORES == 2:
            if index == 0:
                first_value = own_score
            own_score = tl.exp(own_score - first_value)
        total += own_score
        chosen = tl.where(turn == index, number, chosen)
        weight = tl.where(turn == index, own_score, weight)
    if NORMED:
        if ROUNDS_SCORES:
            total = total.to(like.dtype.element_ty).to(tl.float32)
        if SCORES == 1:
            total += least
        if ROUNDS_SCORES:
            total = total.to(like.dtype.element_ty).to(tl.float32)
        weight = tl.div_rn(weight, tl.broadcast_to(total, weight.shape))
    if ROUNDED or ROUNDS_SCORES:
        weight = weight.to(like.dtype.element_ty).to(tl.float32)
    weight *= factor
    if ROUNDS_SCORES:
        weight = weight.to(like.dtype.element_ty).to(tl.float32)
    if factors is not None:
        weight *= tl.load(factors + chosen, mask=turn < CHOSEN, other=0.0).to(tl.float32)
    if END - FIRST < EXPERTS:
        chosen = tl.where((chosen >= FIRST) & (chosen < END), chosen - FIRST, -1)
    tl.store(ids + own, chosen, mask=turn < CHOSEN)
    tl.store(weights + own, weight, mask=turn < CHOSEN)


def choose_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None,
    num_live: Tensor,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row. A NaN in a row changes what this row alone gets, and its experts exist.

    Args:
        logits: [N, num_experts], in the model's dtype or float32; columns behind these are not read.
        bias: [num_experts] float32, which with "sigmoid" counts for the choice and not for the weight.
        num_live: [1] int32: rows from this number on choose nothing.
        dtype: the model's.
        factors: [num_experts] in that dtype, what the weight of each expert is multiplied by in the end; None: nothing.

    Returns:
        Numbers of experts, [N, num_chosen] int32, in the order of the choice, and weights, float32. -1: none.
    """
    num_rows, shape = len(logits), (len(logits), routing.num_chosen)
    first, end = routing.here or (0, routing.num_experts)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    assert logits.is_contiguous() and logits.data_ptr() % 16 == 0, "rows are packed, and begin where all others do"
    if num_rows:
        choose_experts_kernel[(num_rows,)](
            logits, bias, num_live, ids, weights, torch.empty(0, dtype=dtype, device=logits.device), factors,
            routing.factor, routing.least,
            WIDTH=logits.shape[1], EXPERTS=routing.num_experts, CHOSEN=routing.num_chosen,
            SCORES={SOFTMAX: 0, SIGMOID: 1}.get(routing.scores, 2), NORMED=routing.is_normed,
            ROUNDED=routing.is_rounded, ROUNDS_SCORES=routing.rounds_scores,
            GROUPS=routing.num_groups, CHOSEN_GROUPS=routing.num_chosen_groups,
            TILE=next_power_of_2(routing.num_experts), CHOSEN_TILE=next_power_of_2(routing.num_chosen), FIRST=first,
            END=end, num_warps=1, **launch_options(logits, fuses=False),
        )  # fmt: skip
    return ids, weights


@triton.jit
def count_read(experts_read, number):
    """Add to how many experts were read. One program of a launch may, behind its wait: no launch runs beside then."""
    tl.store(experts_read, tl.load(experts_read) + number)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_pairs_kernel(
    ids,  # [num_pairs]
    table,  # [EXPERTS]
    order,  # [num_pairs]
    tiles,  # [num_tiles, 4]
    experts_read,  # [1] int64, more by how many experts have pairs; None: not counted
    num_pairs,
    num_tiles,
    EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERT_TILE)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    # Experts that are not here take no pairs.
    indices = tl.load(table + each, mask=each < EXPERTS, other=-1)
    counts = tl.zeros([EXPERT_TILE], tl.int32)
    for start in range(0, num_pairs, TILE):
        pair = start + tl.arange(0, TILE)
        other = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(other, 0), EXPERT_TILE, mask=other >= 0)
    counts = tl.where(indices >= 0, counts, 0)
    if experts_read is not None:
        if expert == 0:
            count_read(experts_read, tl.sum((counts > 0).to(tl.int32)))
    own_tiles = tl.cdiv(counts, BLOCK_M)
    is_own = each == expert
    is_before = each < expert
    own_index = tl.sum(tl.where(is_own, indices, 0))
    count = tl.sum(tl.where(is_own, counts, 0))
    begin = tl.sum(tl.where(is_before, counts, 0))
    first_tile = tl.sum(tl.where(is_before, own_tiles, 0))
    end = begin + count
    for index in range(0, tl.cdiv(count, BLOCK_M)):
        tile = tiles + (first_tile + index) * 4
        tl.store(tile, own_index)
        tl.store(tile + 1, begin + index * BLOCK_M)
        tl.store(tile + 2, tl.minimum(begin + (index + 1) * BLOCK_M, end))
    if expert == EXPERTS - 1:  # mark the rest: no such tile, no such pair
        for start in range(tl.sum(own_tiles), num_tiles, EXPERT_TILE):
            tl.store(tiles + (start + each) * 4, -1, mask=start + each < num_tiles)
        for start in range(end, num_pairs, EXPERT_TILE):
            tl.store(order + start + each, 0, mask=start + each < num_pairs)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            pair = start + tl.arange(0, TILE)
            is_one = (tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
            tl.store(order + begin + tl.cumsum(is_one) - is_one, pair, mask=is_one > 0)
            begin += tl.sum(is_one)


def sort_pairs(ids: Tensor, table: Tensor, block_m: int, experts_read: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort pairs of row and expert by expert; those of one expert keep their order. No shape depends on the choice.

    Args:
        ids: [N, num_chosen] int32; table: [num_experts] int32, each expert's index in the pool, -1: it is not here.
        block_m: the most pairs of a tile.
        experts_read: [1] int64, to which the number of experts with pairs is added.

    Returns:
        The pairs, as numbers row * num_chosen + index, [N * num_chosen] int32; behind those that choose something, 0.
        And tiles of pairs of one expert, as many as there may be, [num_tiles, 4] int32: the expert's index,
        position of the first pair in this order, and the position behind the last. An index of -1: there is no tile.
    """
    num_pairs, num_experts = ids.numel(), len(table)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    num_tiles = min(num_pairs, num_experts + num_pairs // block_m)
    tiles = torch.empty(num_tiles, 4, dtype=torch.int32, device=ids.device)
    tile = min(PAIRS_AT_ONCE, max(32, next_power_of_2(num_pairs)))
    sort_pairs_kernel[(num_experts,)](
        ids, table, order, tiles, experts_read, num_pairs, num_tiles, EXPERTS=num_experts,
        EXPERT_TILE=next_power_of_2(num_experts), BLOCK_M=block_m, TILE=tile,
        num_warps=max(1, min(8, tile // 128)), **launch_options(ids),
    )  # fmt: skip
    return order, tiles
