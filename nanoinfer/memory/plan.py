"""How the memory budget is spent: worked out from the config alone, before anything is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NoReturn

from nanoinfer.common.units import GIB, enough, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.buffers import buffer_bytes, split_bytes
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
from nanoinfer.memory.streamed import Streamed, choices, least_streamed, link_cost, may_stream_head
from nanoinfer.memory.working import activations, graph_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.expert_slots import pool_bytes
from nanoinfer.models.streamed import place_sizes, spread

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
    given = budget_bytes, slot_bytes, device, host_available_bytes, may_pin
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
    config: EngineConfig, spec: ModelSpec, least: Streamed, *given: int, has_slots: bool = True
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


def _heads(config: EngineConfig, spec: ModelSpec, least: Streamed, *given: int) -> list[bool]:
    """Whether the head is streamed, in the order in which both are tried."""
    *_, device, _, may_pin = given
    return [True] if least.head else [False, True][: 1 + may_stream_head(config, spec, device, may_pin)]


def _contexts(config: EngineConfig) -> tuple[int, ...]:
    """The tokens of context for which there should be room: what is asked for, or a conversation, or any."""
    return (_STREAMING_CONTEXT, 1) if config.max_model_len is None else (config.max_model_len,)


def _streaming_weights(
    config: EngineConfig, spec: ModelSpec, may_stream: Sequence[Streamed], context: int, too_long: list[TooSmall],
    *given: int,
) -> MemoryPlan | None:  # fmt: skip
    """Return the plan with the largest prefill step in which as few weights stream as must be; None: none fits.

    too_long: takes what is said of plans that would fit, but for `max_model_len`.
    """
    for tokens in _batched_tokens(config, given[2]):
        for streamed in may_stream:
            try:
                plan = _spend_all(config, spec, tokens, *given, streamed)
            except TooSmall:  # for host memory; with a smaller step fewer weights stream
                break
            if plan.num_gpu_blocks < min_blocks(config, plan, context):
                continue
            try:
                return _with_model_len(config, plan)
            except TooSmall as error:  # with more weights streamed, more KV stays on the GPU
                too_long.append(error)
    return None


def _slotted(config: EngineConfig, spec: ModelSpec, context: int, *given: int) -> MemoryPlan | None:
    """Return the cheapest plan with experts in slots, of each prefill step the one with most; None: none fits.

    In offload mode also those count that leave less room than for a context, whose KV streams then.
    """
    sparse, (*_, device, _, may_pin) = spec.sparse, given
    gives_layers = config.resident_weights_limit is not None or config.cpu_offload_gb is not None
    if sparse is None or not device.reads_host_memory or not may_pin or gives_layers:
        return None
    rooms = sorted({context, min(context, _STREAMING_CONTEXT), 1}) if config.may_offload else [context]
    found = []
    for room, tokens in product(rooms, _batched_tokens(config, device)):

        def made(count: int, room: int = room, tokens: int = tokens) -> MemoryPlan | None:
            try:
                plan = _spend_all(config, spec, tokens, *given, Streamed(), count)
                blocks = -(-min(room, plan.max_model_len) // config.block_size) + 2
                if plan.num_gpu_blocks < max(blocks, min_blocks(config, plan, room)):
                    return None
                return _with_model_len(config, plan)
            except TooSmall:
                return None

        counts = range(sparse.num_chosen, sparse.num_experts + 1)
        if fitting := bisect_left(counts, True, key=lambda count: made(count) is None):
            found.append(made(counts[fitting - 1]))
    return min(found, key=partial(link_cost, config, spec, context), default=None)


def _holds_as_much(config: EngineConfig, plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether a plan holds as much KV in host memory as another one, or all that can be asked for."""
    most = -(-other.max_model_len // config.block_size) * other.max_num_seqs
    return not config.may_offload or plan.num_host_blocks >= min(other.num_host_blocks, most)


def _unless_slots_bring_much_less(
    config: EngineConfig, spec: ModelSpec, resident: MemoryPlan, *given: int
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


def _refuse(config: EngineConfig, spec: ModelSpec, least: Streamed, *given: int) -> NoReturn:
    """Say how little GPU memory would do with the weights streamed that the host holds, or how much the host must."""
    tokens, plans = _batched_tokens(config, given[2])[-1], []
    heads = _heads(config, spec, least, *given)
    for streamed in sorted({least, *(one for head in heads for one in choices(least, spec, head))}):
        try:
            plans.append(_spend_all(config, spec, tokens, *given, streamed))
        except TooSmall:
            break
    unlimited, room = replace(config, host_memory_limit=None), (*given[:3], _UNLIMITED, given[4])
    roomy = _with_weights_on_the_host(unlimited, spec, least, *room, has_slots=False)
    smallest = min(plans, key=lambda plan: least_bytes(config, plan))
    also = "" if roomy is None else f", or stream more: {host_wanted(config, roomy, given[3])}"
    refuse_gpu(config, smallest, also)


def _spend_all(
    config: EngineConfig, spec: ModelSpec, tokens: int, budget_bytes: int, slot_bytes: int, device: Device,
    host_available_bytes: int, may_pin: bool, streamed: Streamed, num_expert_slots: int = 0, is_tight: bool = True,
) -> MemoryPlan:  # fmt: skip
    """is_tight: whether embeddings lie in host memory, if they may; not of a tied head, which each step reads."""
    may_leave = device.reads_host_memory and may_pin and not spec.tied_embeddings and config.cpu_offload_gb != 0
    away = spec.embedding_bytes if is_tight and may_leave else 0
    plan = _spend(config, spec, tokens, budget_bytes, slot_bytes, device, streamed, num_expert_slots, away)
    return _with_host(config, plan, host_available_bytes)


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


def _spend(
    config: EngineConfig,
    spec: ModelSpec,
    max_num_batched_tokens: int,
    budget_bytes: int,
    slot_bytes: int,
    device: Device,
    streamed: Streamed,
    num_expert_slots: int,
    embedding_bytes: int,
) -> MemoryPlan:
    layout, max_model_len = spec.layout, config.max_model_len or spec.max_position
    max_num_seqs = config.max_num_seqs or (256 if budget_bytes >= 32 * GIB else 64)
    max_blocks = -(-max_model_len // layout.block_size)
    blocks_per_slot = min(slot_bytes // layout.layer_block_bytes, max_blocks * max_num_seqs)
    resident = config.resident_kv_limit
    resident = None if resident is None else resident // layout.block_bytes
    batch_sizes = tuple(config.graph_batch_sizes(max_num_seqs, device))
    token_counts = tuple(config.graph_num_tokens(max_num_batched_tokens, device))
    max_batch, has_graphs = max(batch_sizes[-1], max_num_seqs), device.records_graphs and not config.enforce_eager
    sizes = MemoryPlan(
        blocks_per_slot=blocks_per_slot,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        is_taken_as_needed=device.is_host,
    )
    of_split = split_bytes(spec, config.num_ring_slots)
    scratch_bytes = spec.gpu_scratch_bytes if device.is_fused else spec.scratch_bytes
    pieces, head_bytes = spread(len(spec.piece_bytes), streamed.num_pieces), spec.head_bytes * streamed.head
    host_bytes = sum(spec.piece_bytes[piece] for piece in pieces) + head_bytes
    place_bytes, expert_bytes = sum(place_sizes(spec.run_bytes(pieces, streamed.head))), 0
    rope_bytes = spec.rope_bytes(max_model_len)
    if num_expert_slots:
        expert_bytes = spec.sparse.expert_bytes
        place_bytes = pool_bytes(spec.sparse.strides, spec.sparse.num_experts, num_expert_slots)
    plan = replace(
        sizes,
        budget_bytes=budget_bytes,
        streamed_pieces=pieces,
        head_bytes=head_bytes,
        streamed_bytes=host_bytes,
        num_expert_slots=num_expert_slots,
        expert_bytes=expert_bytes,
        slot_rows=max(max_batch, max(token_counts, default=0)) if num_expert_slots else 0,
        embedding_bytes=embedding_bytes,
        weight_bytes=spec.weight_bytes - host_bytes - expert_bytes - embedding_bytes + scratch_bytes + rope_bytes,
        place_bytes=place_bytes,
        **activations(spec, max_num_batched_tokens, max_batch, device),
        workspace_bytes=buffer_bytes(spec, sizes, batch_sizes, token_counts, config.num_ring_slots),
        library_bytes=device.library_bytes,
        graph_bytes=graph_bytes(spec, max_batch, max(token_counts, default=0)) if has_graphs else 0,
        ring_bytes=config.num_ring_slots * blocks_per_slot * layout.layer_block_bytes + sum(spec.place_bytes),
        block_bytes=layout.block_bytes,
        split_bytes=of_split,
        max_resident_blocks=resident,
    )
    # Each block of the pool brings room for two splits, because rows may share blocks.
    rows = max_num_seqs * of_split
    num_blocks = max(0, budget_bytes - plan.fixed_bytes - rows) // (layout.block_bytes + 2 * of_split)
    if device.is_host or config.enable_cpu_offload is True:
        # A pool larger than all rows can fill is of no use: on the CPU it would take the user's own memory, and in
        # offload mode the host holds what does not fit.
        useful = max_blocks * max_num_seqs + max_num_seqs + 2
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
    """Return the plan with room for `max_splits` splits. More than `_spend` counted on make the GPU pool smaller."""
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
