"""How the memory budget is spent: worked out from the config alone, before anything is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NoReturn

from nanoinfer.common.units import GIB, enough, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.refusals import (
    KV_SHARE,
    TooSmall,
    checked_slots,
    host_wanted,
    least_bytes,
    min_blocks,
    refuse_gpu,
)  # fmt: skip
from nanoinfer.memory.sized import most_blocks, sized_plan
from nanoinfer.memory.streamed import Streamed, choices, least_streamed, link_cost, may_stream_head, placed, slot_bytes
from nanoinfer.models.base import ModelSpec

DEFAULT_RING_SLOT_BYTES = 32 * 2**20
# Prefill steps below so many tokens are too slow to be chosen for the memory that they leave.
_LEAST_TO_STREAM_NOTHING = 1024
# Tokens of context for which streamed weights make room, if they can, where none are asked for: a conversation.
_STREAMING_CONTEXT = 8192
# Share of the budget for the partials and tables of more splits than two for each block: 16 questions about one
# document of 64k tokens are 4,112 splits of 257 blocks, 70 MiB in a 4B model.
SHARED_SPLITS_SHARE = 0.01
_UNLIMITED = 2**60  # of host memory


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    budget_bytes: int,
    host_available_bytes: int,
    device: Device,
    may_pin: bool = True,
) -> MemoryPlan:
    """Divide the budget among the parts of the engine. Where a limit is too small, `TooSmall` says what works.

    may_pin: whether host memory can be pinned, as far as it is known. Experts in slots need it.
    """
    plan = _divide(config, spec, budget_bytes, host_available_bytes, device, may_pin)
    # Without kernels that read packed weights as they lie, their matrices are kept where there is room for all.
    room = plan.budget_bytes - plan.total_bytes
    if device.is_fused or plan.streamed_bytes or not 0 < spec.matrix_bytes <= room:
        return plan
    return replace(plan, matrix_bytes=spec.matrix_bytes)


def _divide(
    config: EngineConfig, spec: ModelSpec, budget_bytes: int, host_available_bytes: int, device: Device, may_pin: bool
) -> MemoryPlan:
    layout = spec.layout
    slot_bytes = max(DEFAULT_RING_SLOT_BYTES, layout.layer_block_bytes)
    if config.ring_slot_bytes is not None:
        slot_bytes = int(config.ring_slot_bytes)
        if slot_bytes < layout.layer_block_bytes:
            raise ValueError(
                f"ring_slot_bytes={config.ring_slot_bytes!r} cannot hold one layer of a KV block: give at least "
                f"{layout.layer_block_bytes} bytes, or lower block_size={config.block_size}"
            )
    spec.check_context(config.max_model_len)
    fitting: list[MemoryPlan] = []
    sized = cache(partial(sized_plan, config, spec, budget_bytes, slot_bytes, device))
    given = sized, device, host_available_bytes, may_pin
    least = least_streamed(config, spec, may_stream_head(config, spec, device, may_pin))
    slots = checked_slots(config, spec)
    for tokens in _batched_tokens(config, device):
        plan = _spend_all(config, spec, tokens, *given, least, slots, is_tight=any(least) or slots > 0)
        if plan.num_gpu_blocks < min_blocks(config, plan):
            continue
        fitting.append(plan)
        if config.max_model_len is None or tokens < _LEAST_TO_STREAM_NOTHING:
            break
        # The largest step is the fastest, but where a smaller one leaves room for all KV, nothing streams.
        if plan.num_gpu_blocks > -(-config.max_model_len // config.block_size) * plan.max_num_seqs:
            return _with_model_len(config, plan)
    try:
        resident = _with_model_len(config, fitting[0] if fitting else refuse_gpu(config, plan))
        return resident if slots else _unless_slots_bring_much_less(config, spec, resident, *given)
    except TooSmall:
        if config.cpu_offload_gb == 0 or fitting and config.enable_cpu_offload is True:  # which host memory bounds
            raise
        if config.expert_slots is not None:
            raise
        found = _with_weights_on_the_host(config, spec, least, *given)
        if found is None and fitting:
            raise
    return found or _refuse(config, spec, least, *given)


def _with_weights_on_the_host(
    config: EngineConfig, spec: ModelSpec, least: Streamed, *given: Any, has_slots: bool = True
) -> MemoryPlan | None:
    """Return the cheaper of the plans with layers that stream and with experts in slots; None: none fits.

    The head is streamed where nothing fits that has it on the GPU.

    Raises:
        TooSmall: it would fit, but for `max_model_len`.
    """
    too_long: list[TooSmall] = []
    for head, context in product(_heads(config, spec, least, *given), _contexts(config)):
        streaming = _streaming_weights(config, spec, choices(least, spec, head), context, too_long, *given)
        if head and streaming is not None:
            return streaming
        slotted = _slotted(config, spec, context, *given) if has_slots else None
        if slotted is None or streaming is None:
            found = slotted or streaming
        else:
            holds = _holds_as_much(config, slotted, streaming)
            found = min(streaming, slotted, key=partial(link_cost, config, spec, context)) if holds else streaming
        if found is not None:
            return found
    if too_long:
        raise too_long[0]
    return None


def _heads(config: EngineConfig, spec: ModelSpec, least: Streamed, *given: Any) -> list[bool]:
    """Whether the head is streamed, in the order in which both are tried."""
    _, device, _, may_pin = given
    return [True] if least.head else [False, True][: 1 + may_stream_head(config, spec, device, may_pin)]


def _contexts(config: EngineConfig) -> tuple[int, ...]:
    """The tokens of context for which there should be room: what is asked for, or a conversation, or any."""
    return (_STREAMING_CONTEXT, 1) if config.max_model_len is None else (config.max_model_len,)


def _streaming_weights(
    config: EngineConfig, spec: ModelSpec, may_stream: Sequence[Streamed], context: int, too_long: list[TooSmall],
    *given: Any,
) -> MemoryPlan | None:  # fmt: skip
    """Return the plan with the largest prefill step in which as few weights stream as must be; None: none fits.

    too_long: takes what is said of plans that would fit, but for `max_model_len`.
    """
    sized, device, _, may_pin = given
    for tokens in _batched_tokens(config, device):
        wanted = min_blocks(config, sized(tokens), context)
        for streamed in may_stream:
            gains = placed(spec, streamed).freed_bytes + _embedding_bytes(config, spec, device, may_pin)
            if most_blocks(sized(tokens), gains) < wanted:
                continue
            try:
                plan = _spend_all(config, spec, tokens, *given, streamed)
            except TooSmall:  # for host memory; with a smaller step fewer weights stream
                break
            if plan.num_gpu_blocks < wanted:
                continue
            try:
                return _with_model_len(config, plan)
            except TooSmall as error:
                too_long.append(error)
            # With more weights streamed, less KV lies in host memory, and more stays on the GPU.
            if config.enable_cpu_offload is True:
                break
            wanted = max(wanted, -(-plan.max_model_len // config.block_size) + 1)
    return None


def _slotted(config: EngineConfig, spec: ModelSpec, context: int, *given: Any) -> MemoryPlan | None:
    """Return the cheapest plan with experts in slots, of each prefill step the one with most; None: none fits.

    In offload mode also those count that leave less room than for a context, whose KV streams then.
    """
    sparse, (sized, device, _, may_pin) = spec.sparse, given
    gives_layers = config.resident_weights_limit is not None or config.cpu_offload_gb is not None
    if sparse is None or not device.reads_host_memory or not may_pin or gives_layers:
        return None
    rooms = sorted({context, min(context, _STREAMING_CONTEXT), 1}) if config.may_offload else [context]
    found = []
    counts = range(sparse.num_chosen, sparse.num_experts + 1)
    gains = sparse.expert_bytes + _embedding_bytes(config, spec, device, may_pin)
    sizes = _batched_tokens(config, device)
    try:
        plan = _spend_all(config, spec, sizes[-1], *given, Streamed(), counts[0])
        if config.enable_cpu_offload is True:
            _with_model_len(config, plan)
    except TooSmall:  # for host memory, of which any size and any number of slots take the same
        return None
    for room, tokens in product(rooms, sizes):
        one = sized(tokens)
        blocks = -(-min(room, one.max_model_len) // config.block_size) + 2
        wanted = max(blocks, min_blocks(config, one, room))

        def made(count: int, tokens: int = tokens, wanted: int = wanted) -> MemoryPlan | None:
            try:
                plan = _spend_all(config, spec, tokens, *given, Streamed(), count)
                return None if plan.num_gpu_blocks < wanted else _with_model_len(config, plan)
            except TooSmall:
                return None

        def leaves_less(count: int, one: MemoryPlan = one, wanted: int = wanted) -> bool:
            return most_blocks(one, gains - slot_bytes(sparse, count)) < wanted

        most = bisect_left(counts, True, key=leaves_less)
        if most and (plan := made(counts[most - 1])) is None:
            most = bisect_left(counts[:most], True, key=lambda count: made(count) is None)
            plan = made(counts[most - 1]) if most else None
        if most:
            found.append(plan)
    return min(found, key=partial(link_cost, config, spec, context), default=None)


def _holds_as_much(config: EngineConfig, plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether a plan holds as much KV in host memory as another one, or all that can be asked for."""
    most = -(-other.max_model_len // config.block_size) * other.max_num_seqs
    return not config.may_offload or plan.num_host_blocks >= min(other.num_host_blocks, most)


def _unless_slots_bring_much_less(
    config: EngineConfig, spec: ModelSpec, resident: MemoryPlan, *given: Any
) -> MemoryPlan:
    """Return the plan with all weights on the GPU, unless slots for experts make room for KV that streams without.

    They must halve what passes over the link: it is waited for then. Where no context is asked for: unless a
    conversation does not fit.
    """
    context = _contexts(config)[0]
    cost = partial(link_cost, config, spec, context)
    is_asked = config.max_model_len is not None
    is_long = resident.max_model_len >= min(_STREAMING_CONTEXT, spec.max_position)
    if is_long if not is_asked else cost(resident) == 0:
        return resident
    slotted = _slotted(config, spec, context, *given)
    if slotted is None or not _holds_as_much(config, slotted, resident):
        return resident
    is_better = cost(slotted) < cost(resident) / 2 if is_asked else slotted.max_model_len > resident.max_model_len
    return slotted if is_better else resident


def _refuse(config: EngineConfig, spec: ModelSpec, least: Streamed, *given: Any) -> NoReturn:
    """Say how little GPU memory would do with the weights streamed that the host holds, or how much the host must."""
    sized, device, _, may_pin = given
    tokens, plans = _batched_tokens(config, device)[-1], []
    one, away = sized(tokens), _embedding_bytes(config, spec, device, may_pin)
    heads = _heads(config, spec, least, *given)
    several = sorted({least, *(one for head in heads for one in choices(least, spec, head))})

    def is_refused(streamed: Streamed) -> bool:
        try:
            return _spend_all(config, spec, tokens, *given, streamed) is None
        except TooSmall:  # for host memory, of which more bytes need more
            return True

    several.sort(key=lambda streamed: placed(spec, streamed).num_bytes)
    held = several[: bisect_left(several, True, key=is_refused)] or several[:1]  # which says how much the host lacks
    for streamed in sorted(held, key=lambda streamed: -placed(spec, streamed).freed_bytes):
        at_least = replace(one, weight_bytes=one.weight_bytes - away - placed(spec, streamed).freed_bytes)
        if plans and least_bytes(config, at_least) > min(least_bytes(config, plan) for plan in plans):
            break
        plans.append(_spend_all(config, spec, tokens, *given, streamed))
    unlimited, room = replace(config, host_memory_limit=None), (*given[:2], _UNLIMITED, given[3])
    roomy = _with_weights_on_the_host(unlimited, spec, least, *room, has_slots=False)
    smallest = min(plans, key=lambda plan: (least_bytes(config, plan), len(plan.streamed_pieces), plan.head_bytes))
    also = "" if roomy is None else f", or stream more: {host_wanted(config, roomy, given[2])}"
    refuse_gpu(config, smallest, also)


def _spend_all(
    config: EngineConfig, spec: ModelSpec, tokens: int, sized: Callable[[int], MemoryPlan], device: Device,
    host_available_bytes: int, may_pin: bool, streamed: Streamed, num_expert_slots: int = 0, is_tight: bool = True,
) -> MemoryPlan:  # fmt: skip
    """is_tight: whether embeddings lie in host memory, if they may."""
    away = _embedding_bytes(config, spec, device, may_pin) if is_tight else 0
    plan = spend(config, spec, sized(tokens), device, streamed, num_expert_slots, away)
    return _with_host(config, plan, host_available_bytes)


def _embedding_bytes(config: EngineConfig, spec: ModelSpec, device: Device, may_pin: bool) -> int:
    """Return the bytes of embeddings that may lie in host memory; not of a tied head, which each step reads."""
    may_leave = device.reads_host_memory and may_pin and not spec.tied_embeddings and config.cpu_offload_gb != 0
    return spec.embedding_bytes if may_leave else 0


def _batched_tokens(config: EngineConfig, device: Device) -> list[int]:
    if config.max_num_batched_tokens is not None:
        return [config.max_num_batched_tokens]
    sizes = [size for size in (8192, 4096, 2048, 1024, 512, 256) if size <= device.most_step_tokens]
    captured = max(config.capture_num_tokens or [], default=0)
    if captured > sizes[0]:
        raise ValueError(
            f"capture_num_tokens={config.capture_num_tokens!r} holds {captured}, and a prefill step has at most "
            f"{sizes[0]} tokens here: lower capture_num_tokens or set max_num_batched_tokens"
        )
    return [size for size in sizes if size >= captured]


def spend(
    config: EngineConfig, spec: ModelSpec, sized: MemoryPlan, device: Device, streamed: Streamed,
    num_expert_slots: int, embedding_bytes: int,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of this size with its pool, and what is streamed, has slots or lies in host memory."""
    on_host = placed(spec, streamed)
    expert_bytes = spec.sparse.expert_bytes if num_expert_slots else 0
    plan = replace(
        sized,
        streamed_pieces=on_host.pieces,
        head_bytes=spec.head_bytes * streamed.head,
        streamed_bytes=on_host.num_bytes,
        num_expert_slots=num_expert_slots,
        expert_bytes=expert_bytes,
        slot_rows=sized.slot_rows * (num_expert_slots > 0),
        embedding_bytes=embedding_bytes,
        weight_bytes=sized.weight_bytes - on_host.num_bytes - expert_bytes - embedding_bytes,
        place_bytes=slot_bytes(spec.sparse, num_expert_slots) if num_expert_slots else on_host.place_bytes,
    )
    num_blocks, max_blocks = most_blocks(plan), -(-plan.max_model_len // config.block_size)
    if device.is_host or config.enable_cpu_offload is True:
        # A pool larger than all rows can fill is of no use: on the CPU it would take the user's own memory, and in
        # offload mode the host holds what does not fit.
        useful = max_blocks * plan.max_num_seqs + plan.max_num_seqs + 2
        num_blocks = min(num_blocks, max(useful, min_blocks(config, plan)))
    num_blocks = min(num_blocks, config.num_gpu_blocks_override or num_blocks)
    return replace(plan, num_gpu_blocks=num_blocks)


def _with_host(config: EngineConfig, plan: MemoryPlan, available_bytes: int) -> MemoryPlan:
    """Divide host memory: streamed weights first, then KV blocks."""
    most = -(-plan.max_model_len // config.block_size) * plan.max_num_seqs
    streamed, limit = plan.host_weight_bytes, config.host_memory_limit
    takes_host = config.may_offload or streamed > 0
    if limit is not None and limit > available_bytes and takes_host:
        raise ValueError(
            f"host_memory_limit={config.host_memory_limit!r} is {limit / GIB:.2f} GiB, "
            f"{available_bytes / GIB:.2f} GiB are available: lower host_memory_limit"
        )
    room = available_bytes - plan.fixed_bytes * plan.is_taken_as_needed  # on the CPU both are the same memory
    if streamed > max(0, room):
        raise TooSmall(host_wanted(replace(config, host_memory_limit=None), plan, max(0, room)))
    if streamed > (available_bytes if limit is None else limit):
        raise TooSmall(host_wanted(config, plan, available_bytes))
    if limit is not None:
        num_blocks = (limit - streamed) // plan.block_bytes
        wanted = config.max_model_len or config.block_size
        smallest = -(-wanted // config.block_size)
        if num_blocks < smallest and config.enable_cpu_offload is True:
            beside = f" beside {format_size(streamed)} of weights" if streamed else ""
            least = smallest * plan.block_bytes + streamed
            raise TooSmall(
                f"host_memory_limit={config.host_memory_limit!r} is too small{beside}: the KV cache of {wanted} tokens "
                f'takes {format_size(smallest * plan.block_bytes)}: give at least "{enough(least)}"'
            )
    else:
        num_blocks = min(int((available_bytes - streamed) * KV_SHARE) // plan.block_bytes, most)
    plan = replace(plan, num_host_blocks=max(1, num_blocks))
    fewest = min(most, 2 * max(plan.num_gpu_blocks, plan.num_host_blocks) + plan.max_num_seqs)
    # Many rows may share one long beginning, and then attend to far more splits than there are blocks.
    shared = min(most, max(fewest, int(SHARED_SPLITS_SHARE * plan.budget_bytes) // plan.split_bytes))
    generous = _with_splits(plan, shared)
    if generous.num_gpu_blocks >= min_blocks(config, generous):
        return generous
    return _with_splits(plan, fewest)


def _with_splits(plan: MemoryPlan, max_splits: int) -> MemoryPlan:
    """Return the plan with room for `max_splits` splits. More than `spend` counted on make the GPU pool smaller."""
    room = (plan.budget_bytes - plan.fixed_bytes - max_splits * plan.split_bytes) // plan.block_bytes
    return replace(plan, num_gpu_blocks=min(plan.num_gpu_blocks, max(0, room)), max_splits=max_splits)


def _with_model_len(config: EngineConfig, plan: MemoryPlan) -> MemoryPlan:
    """Cut a `max_model_len` that the user left open to what one sequence can have."""
    # Resident mode keeps a spare block, so that a preempted sequence can come back beside another one.
    blocks = plan.num_gpu_blocks - 1
    if config.may_offload:
        blocks = plan.num_host_blocks if config.enable_cpu_offload is True else max(blocks, plan.num_host_blocks)
    capacity = blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        wanted = -(-config.max_model_len // config.block_size) * plan.block_bytes
        raise TooSmall(
            f"max_model_len={config.max_model_len} needs a KV cache of {format_size(wanted)}, and "
            f"{format_size(blocks * plan.block_bytes)} fit: lower max_model_len to at most {capacity} or raise "
            f"{'host_memory_limit' if config.may_offload else 'gpu_memory_limit'}"
        )
    return replace(plan, max_model_len=min(plan.max_model_len, capacity))
