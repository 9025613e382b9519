"""What is streamed: weights, of which settings may ask for some, and the KV blocks of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from nanoinfer.common.units import GIB, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.refusals import TooSmall
from nanoinfer.models.base import ModelSpec, SparseSpec
from nanoinfer.models.expert_slots import pool_bytes
from nanoinfer.models.streamed import place_sizes, spread

# Tokens of prompts for each generated one, by which plans are compared.
_PROMPT_TOKENS = 32


class Streamed(NamedTuple):
    """Which weights are streamed: of so many pieces, and of the head."""

    num_pieces: int = 0
    head: bool = False


class Placed(NamedTuple):
    """Weights that are streamed: their pieces, their bytes in host memory, and those of their places on the GPU."""

    pieces: tuple[int, ...]
    num_bytes: int
    place_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What is freed on the GPU, which the places may take and more."""
        return self.num_bytes - self.place_bytes


@lru_cache(maxsize=4096)
def placed(spec: ModelSpec, streamed: Streamed) -> Placed:
    """Kept: plans of many sizes stream the same."""
    pieces = spread(len(spec.piece_bytes), streamed.num_pieces)
    num_bytes = sum(spec.piece_bytes[piece] for piece in pieces) + spec.head_bytes * streamed.head
    return Placed(pieces, num_bytes, sum(place_sizes(spec.run_bytes(pieces, streamed.head))))


@lru_cache(maxsize=4096)
def slot_bytes(sparse: SparseSpec, num_slots: int) -> int:
    """Return the bytes of the pools of experts with so many slots in each layer."""
    return pool_bytes(sparse.strides, sparse.num_experts, num_slots)


def may_stream_head(config: EngineConfig, spec: ModelSpec, device: Device, may_pin: bool) -> bool:
    """Whether the head may lie in host memory: one that is tied to the embeddings where kernels read it there."""
    reads = device.is_host or device.reads_host_memory and may_pin
    return config.cpu_offload_gb != 0 and (reads or not spec.tied_embeddings)


def least_streamed(config: EngineConfig, spec: ModelSpec, may_stream_head: bool) -> Streamed:
    """Return what the settings alone ask to be streamed.

    The head comes behind all layers, or with a limit of what stays that is below its own bytes.
    """
    of_layers, most = sum(spec.piece_bytes[1:]), len(spec.piece_bytes) - 1
    streamable = of_layers + spec.head_bytes * may_stream_head
    wanted, limit = int((config.cpu_offload_gb or 0) * GIB), config.resident_weights_limit
    if wanted > streamable:
        stays = "norms and" if may_stream_head else "the head, norms and"
        raise TooSmall(
            f"cpu_offload_gb={config.cpu_offload_gb!r} is more than the {format_size(streamable)} of weights that can "
            f"be streamed: {stays} the first layer's queries, keys and values stay on the GPU. Give "
            f"at most {streamable / GIB:.2f}, or resident_weights_limit=0 to stream all that can be"
        )
    head = may_stream_head and (wanted > of_layers or limit is not None and limit < spec.head_bytes)
    wanted -= spec.head_bytes * (head and wanted > of_layers)
    if limit is not None:
        wanted = max(wanted, of_layers - limit)
    count = next(n for n in range(most + 1) if sum(spec.piece_bytes[piece] for piece in spread(most + 1, n)) >= wanted)
    return Streamed(count, head)


def choices(least: Streamed, spec: ModelSpec, head: bool) -> list[Streamed]:
    """Return what may be streamed with the head or without, ascending: from what the settings ask for to all layers."""
    most = len(spec.piece_bytes) - 1
    # An even number: with an odd one the first piece of a step would wait for the place of the last.
    counts = {min(count + count % 2, most) for count in range(least.num_pieces, most + 1)}
    return [Streamed(count, head) for count in sorted(counts)]


def num_blocks(spec: ModelSpec, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the KV blocks of rows of so many tokens: those that are full, and all."""
    size = spec.layout.block_size
    return sum(length // size for length in lengths), sum(-(-length // size) for length in lengths)


def num_streamed(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, lengths: Sequence[int]) -> int:
    """Return how many full blocks of rows of so many tokens stay in host memory alone."""
    num_full, num_all = num_blocks(spec, lengths)
    room, most = memory.num_gpu_blocks - 1, num_full  # without scratch
    if num_all > room and config.may_offload:
        most = max(0, room - len(lengths))  # each row has a tail, which nothing but the GPU holds
    elif config.enable_cpu_offload is not True:
        return 0
    resident = most if memory.max_resident_blocks is None else min(most, memory.max_resident_blocks)
    return max(0, num_full - resident)


def streamed_bytes(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, lengths: Sequence[int]) -> int:
    """Return what each decode step of rows of so many tokens moves over the link."""
    full_layers = sum(window is None for window in spec.windows)
    kv_bytes = num_streamed(config, spec, memory, lengths) * full_layers * spec.layout.layer_block_bytes
    return memory.streamed_bytes + kv_bytes


def missed_bytes(spec: ModelSpec, memory: MemoryPlan, num_rows: int, hit_rate: float | None = None) -> int:
    """Return what a decode step of so many rows brings of experts that lie in host memory.

    hit_rate: share of the chosen experts that are in a slot; None: as if all were chosen equally often.
    """
    if not memory.num_expert_slots:
        return 0
    hit_rate = memory.num_expert_slots / spec.sparse.num_experts if hit_rate is None else hit_rate
    return int(memory.expert_bytes * spec.sparse.chosen_share(num_rows) * (1 - hit_rate))


def link_cost(config: EngineConfig, spec: ModelSpec, context: int, memory: MemoryPlan) -> float:
    """Return the bytes that pass over the link for a token of each row, and for the tokens of prompts beside it.

    Experts are taken to be chosen equally often.
    """
    rows = [min(context, memory.max_model_len)] * (config.max_num_seqs or 1)
    decode = streamed_bytes(config, spec, memory, rows) + missed_bytes(spec, memory, len(rows))
    of_prompts = memory.passing_bytes - memory.head_bytes  # the head is brought for the last tokens alone
    return decode + len(rows) * _PROMPT_TOKENS * of_prompts / memory.max_num_batched_tokens
