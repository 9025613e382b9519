"""What a prefill step of some size takes, whatever is streamed: counted once for all plans of this size."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.common.speculation import MAX_LINES
from nanoinfer.common.units import GIB
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.buffers import buffer_bytes, split_bytes
from nanoinfer.memory.working import activations, graph_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.step.memory_plan import MemoryPlan

LARGE = 32 * GIB
"""From such a budget on an engine serves many."""
LEAST_STATES = 4
RING_SLOTS = 4


def _slots(
    config: EngineConfig, spec: ModelSpec, budget_bytes: int, max_num_seqs: int, num_lines: int
) -> tuple[int, int]:
    """Return how many sequences may have states: as asked, or as many as a small share of the budget holds; and how
    many slots there are beside theirs, where the share holds more, for so many rows and drafted tokens.

    States of 64 sequences of a 27B model with Gated DeltaNet are 9 GiB, whoever runs.
    """
    if not spec.state_bytes:
        return max_num_seqs, 0
    share = budget_bytes // (8 if budget_bytes >= LARGE else 16)
    most = max(LEAST_STATES, share // spec.state_bytes)
    num_slots = min(max_num_seqs, most if config.state_slots is None else config.state_slots)
    return num_slots, max(0, min(num_lines, most) - num_slots)


def sized_plan(
    config: EngineConfig, spec: ModelSpec, budget_bytes: int, slot_bytes: int, device: Device,
    max_num_batched_tokens: int,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of a prefill step without a pool: all weights are on the GPU, and `slot_rows` as with slots."""
    layout, max_model_len = spec.layout, config.max_model_len or spec.max_position
    max_num_seqs = config.max_num_seqs or (256 if budget_bytes >= LARGE else 64)
    num_lines = 0
    if isinstance(config.speculative_config, dict):  # drafted tokens lie in rows of their own
        num_lines = min(MAX_LINES, max_num_seqs * (1 + config.speculative_config["num_speculative_tokens"]))
    num_slots, num_draft_slots = _slots(config, spec, budget_bytes, max_num_seqs, num_lines)
    max_num_seqs = max(max_num_seqs, num_lines)
    max_blocks = spec.kv_groups.most_blocks(max_model_len)
    blocks_per_slot = min(slot_bytes // layout.part_bytes, max_blocks * max_num_seqs)
    num_ring_slots = config.num_ring_slots or RING_SLOTS
    resident = config.resident_kv_limit
    resident = None if resident is None else resident // layout.block_bytes
    batch_sizes = tuple(config.graph_batch_sizes(max_num_seqs, device))
    token_counts = tuple(config.graph_num_tokens(max_num_batched_tokens, device))
    max_batch, has_graphs = max(batch_sizes[-1], max_num_seqs), device.records_graphs and not config.enforce_eager
    sizes = MemoryPlan(
        num_ring_slots=num_ring_slots,
        blocks_per_slot=blocks_per_slot,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_state_slots=num_slots,
        num_draft_slots=num_draft_slots,
        num_lines=num_lines,
        max_num_batched_tokens=max_num_batched_tokens,
        step_unit=spec.step_unit,
        is_taken_as_needed=device.is_host,
    )
    of_split = split_bytes(spec, num_ring_slots)
    scratch_bytes = spec.gpu_scratch_bytes if device.is_fused else spec.scratch_bytes
    return replace(
        sizes,
        budget_bytes=budget_bytes,
        slot_rows=max(max_batch, max(token_counts, default=0)),
        weight_bytes=spec.weight_bytes + scratch_bytes + spec.rope_bytes(max_model_len),
        **activations(spec, max_num_batched_tokens, max_batch, device),
        workspace_bytes=buffer_bytes(spec, sizes, batch_sizes, token_counts),
        library_bytes=device.library_bytes + max(0, spec.segment_bytes - device.segment_bytes) * device.counts_memory,
        graph_bytes=graph_bytes(spec, max_batch, max(token_counts, default=0)) if has_graphs else 0,
        ring_bytes=num_ring_slots * blocks_per_slot * layout.part_bytes,
        block_bytes=layout.block_bytes,
        groups=spec.kv_groups,
        split_bytes=of_split,
        max_resident_blocks=resident,
    )


def most_blocks(sized: MemoryPlan, gained_bytes: int = 0) -> int:
    """Return the most blocks of a pool beside all else, of which so many bytes are not on the GPU."""
    # Each block of the pool brings room for two splits, because rows may share blocks.
    rows = sized.max_num_seqs * sized.split_bytes
    left = sized.budget_bytes - sized.fixed_bytes + gained_bytes - rows
    return max(0, left) // (sized.block_bytes + 2 * sized.split_bytes)
