"""Which candidate an engine takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NoReturn

from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.candidates import Candidate, Streamed, choices, placed
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.refusals import TooSmall, checked_slots, host_wanted, least_bytes, min_blocks, refuse_gpu
from nanoinfer.memory.streamed import link_cost

# Prefill steps below so many tokens are too slow to be chosen for the memory that they leave.
_LEAST_TO_STREAM_NOTHING = 1024
# Tokens of context for which streamed weights make room, if they can, where none are asked for: a conversation.
_STREAMING_CONTEXT = 8192
_UNLIMITED = 2**60  # of host memory


def best_plan(planner: Planner) -> MemoryPlan:
    """Return the plan to take; where none fits, `TooSmall` says what works."""
    config, spec = planner.config, planner.spec
    spec.check_context(config.max_model_len)
    fitting: list[MemoryPlan] = []
    least, slots = planner.least, checked_slots(config, spec)
    for tokens in planner.steps:
        plan = _held(planner, Candidate(tokens, least, slots, embeddings=any(least) or slots > 0))
        if plan.num_gpu_blocks < min_blocks(config, plan):
            continue
        fitting.append(plan)
        if config.max_model_len is None or tokens < _LEAST_TO_STREAM_NOTHING:
            break
        # The largest step is the fastest, but where a smaller one leaves room for all KV, nothing streams.
        if plan.num_gpu_blocks > -(-config.max_model_len // config.block_size) * plan.max_num_seqs:
            return _with_model_len(planner, plan)
    try:
        resident = _with_model_len(planner, fitting[0] if fitting else refuse_gpu(config, plan))
        return resident if slots else _unless_slots_bring_much_less(planner, resident)
    except TooSmall:
        if config.cpu_offload_gb == 0 or fitting and config.enable_cpu_offload is True:  # which host memory bounds
            raise
        if config.expert_slots is not None:
            raise
        found = _with_weights_on_the_host(planner)
        if found is None and fitting:
            raise
    return found or _refuse(planner)


def _held(planner: Planner, candidate: Candidate) -> MemoryPlan:
    """Return the plan of a candidate; TooSmall: for host memory."""
    cost = planner.cost(candidate)
    if cost.lacks_host is not None:
        raise cost.lacks_host()
    return cost.plan


def _with_model_len(planner: Planner, plan: MemoryPlan) -> MemoryPlan:
    """Cut a `max_model_len` that the user left open to what one sequence can have."""
    if (error := planner.lacks_length(plan)) is not None:
        raise error
    return replace(plan, max_model_len=min(plan.max_model_len, planner.capacity(plan)))


def _with_weights_on_the_host(planner: Planner, has_slots: bool = True) -> MemoryPlan | None:
    """Return the cheaper of the plans with layers that stream and with experts in slots; None: none fits.

    The head is streamed where nothing fits that has it on the GPU.

    Raises:
        TooSmall: it would fit, but for `max_model_len`.
    """
    too_long: list[TooSmall] = []
    for head, context in product(_heads(planner), _contexts(planner)):
        streaming = _streaming_weights(planner, choices(planner.least, planner.spec, head), context, too_long)
        if head and streaming is not None:
            return streaming
        slotted = _slotted(planner, context) if has_slots else None
        if slotted is None or streaming is None:
            found = slotted or streaming
        else:
            holds = _holds_as_much(planner, slotted, streaming)
            cost = partial(link_cost, planner.config, planner.spec, context)
            found = min(streaming, slotted, key=cost) if holds else streaming
        if found is not None:
            return found
    if too_long:
        raise too_long[0]
    return None


def _heads(planner: Planner) -> list[bool]:
    """Whether the head is streamed, in the order in which both are tried."""
    return [True] if planner.least.head else [False, True][: 1 + planner.may_stream_head]


def _contexts(planner: Planner) -> tuple[int, ...]:
    """The tokens of context for which there should be room: what is asked for, or a conversation, or any."""
    asked = planner.config.max_model_len
    return (_STREAMING_CONTEXT, 1) if asked is None else (asked,)


def _streaming_weights(
    planner: Planner, may_stream: Sequence[Streamed], context: int, too_long: list[TooSmall]
) -> MemoryPlan | None:
    """Return the plan with the largest prefill step in which as few weights stream as must be; None: none fits.

    too_long: takes what is said of plans that would fit, but for `max_model_len`.
    """
    config = planner.config
    for tokens in planner.steps:
        wanted = min_blocks(config, planner.sized(tokens), context)
        for streamed in may_stream:
            candidate = Candidate(tokens, streamed)
            if planner.blocks_with(candidate) < wanted:
                continue
            cost = planner.cost(candidate)
            if cost.lacks_host is not None:  # with a smaller step fewer weights stream
                break
            if cost.plan.num_gpu_blocks < wanted:
                continue
            try:
                plan = _with_model_len(planner, cost.plan)
                return plan
            except TooSmall as error:
                too_long.append(error)
            # With more weights streamed, less KV lies in host memory, and more stays on the GPU.
            if config.enable_cpu_offload is True:
                break
            wanted = max(wanted, -(-cost.plan.max_model_len // config.block_size) + 1)
    return None


def _slotted(planner: Planner, context: int) -> MemoryPlan | None:
    """Return the cheapest plan with experts in slots, of each prefill step the one with most; None: none fits.

    In offload mode also those count that leave less room than for a context, whose KV streams then.
    """
    config, sparse = planner.config, planner.spec.sparse
    if not planner.may_have_slots:
        return None
    rooms = sorted({context, min(context, _STREAMING_CONTEXT), 1}) if config.may_offload else [context]
    found = []
    counts = range(sparse.num_chosen, sparse.num_experts + 1)
    first = planner.cost(Candidate(planner.steps[-1], num_expert_slots=counts[0]))
    # Of host memory any size and any number of slots take the same.
    if first.lacks_host is not None or config.enable_cpu_offload is True and planner.lacks_length(first.plan):
        return None
    for room, tokens in product(rooms, planner.steps):
        one = planner.sized(tokens)
        blocks = -(-min(room, one.max_model_len) // config.block_size) + 2
        wanted = max(blocks, min_blocks(config, one, room))

        def made(count: int, tokens: int = tokens, wanted: int = wanted) -> MemoryPlan | None:
            cost = planner.cost(Candidate(tokens, num_expert_slots=count))
            if cost.lacks_host is not None or cost.plan.num_gpu_blocks < wanted or planner.lacks_length(cost.plan):
                return None
            return _with_model_len(planner, cost.plan)

        def leaves_less(count: int, tokens: int = tokens, wanted: int = wanted) -> bool:
            return planner.blocks_with(Candidate(tokens, num_expert_slots=count)) < wanted

        most = bisect_left(counts, True, key=leaves_less)
        if most and (plan := made(counts[most - 1])) is None:
            most = bisect_left(counts[:most], True, key=lambda count: made(count) is None)
            plan = made(counts[most - 1]) if most else None
        if most:
            found.append(plan)
    return min(found, key=partial(link_cost, config, planner.spec, context), default=None)


def _holds_as_much(planner: Planner, plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether a plan holds as much KV in host memory as another one, or all that can be asked for."""
    most = -(-other.max_model_len // planner.config.block_size) * other.max_num_seqs
    return not planner.config.may_offload or plan.num_host_blocks >= min(other.num_host_blocks, most)


def _unless_slots_bring_much_less(planner: Planner, resident: MemoryPlan) -> MemoryPlan:
    """Return the plan with all weights on the GPU, unless slots for experts make room for KV that streams without.

    They must halve what passes over the link: it is waited for then. Where no context is asked for: unless a
    conversation does not fit.
    """
    config, spec, context = planner.config, planner.spec, _contexts(planner)[0]
    cost = partial(link_cost, config, spec, context)
    is_asked = config.max_model_len is not None
    is_long = resident.max_model_len >= min(_STREAMING_CONTEXT, spec.max_position)
    if is_long if not is_asked else cost(resident) == 0:
        return resident
    slotted = _slotted(planner, context)
    if slotted is None or not _holds_as_much(planner, slotted, resident):
        return resident
    is_better = cost(slotted) < cost(resident) / 2 if is_asked else slotted.max_model_len > resident.max_model_len
    return slotted if is_better else resident


def _refuse(planner: Planner) -> NoReturn:
    """Say how little GPU memory would do with the weights streamed that the host holds, or how much the host must."""
    config, spec, least = planner.config, planner.spec, planner.least
    tokens, plans = planner.steps[-1], []
    one, away = planner.sized(tokens), planner.embedding_bytes
    several = sorted({least, *(one for head in _heads(planner) for one in choices(least, spec, head))})
    several.sort(key=lambda streamed: placed(spec, streamed).num_bytes)

    def is_refused(streamed: Streamed) -> bool:  # more bytes need more
        return planner.cost(Candidate(tokens, streamed)).lacks_host is not None

    held = several[: bisect_left(several, True, key=is_refused)] or several[:1]  # which says how much the host lacks
    for streamed in sorted(held, key=lambda streamed: -placed(spec, streamed).freed_bytes):
        at_least = replace(one, weight_bytes=one.weight_bytes - away - placed(spec, streamed).freed_bytes)
        if plans and least_bytes(config, at_least) > min(least_bytes(config, plan) for plan in plans):
            break
        plans.append(_held(planner, Candidate(tokens, streamed)))
    unlimited = replace(planner, config=replace(config, host_memory_limit=None), host_available_bytes=_UNLIMITED)
    roomy = _with_weights_on_the_host(unlimited, has_slots=False)
    smallest = min(plans, key=lambda plan: (least_bytes(config, plan), len(plan.streamed_pieces), plan.head_bytes))
    also = "" if roomy is None else f", or stream more: {host_wanted(config, roomy, planner.host_available_bytes)}"
    refuse_gpu(config, smallest, also)
