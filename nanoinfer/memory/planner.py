"""What an engine may choose for its memory, and what each choice comes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nanoinfer.common.units import GIB, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.memory.candidates import Candidate, StreamedChoice, sizes_of, slot_bytes
from nanoinfer.memory.limits import KV_SHARE, above_available, min_blocks
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.sized import most_blocks, sized_plan
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.streamed import spread
from nanoinfer.step.memory_plan import MemoryPlan
from offload.groups import UNBOUNDED

DEFAULT_RING_SLOT_BYTES = 32 * 2**20
# Share of the budget for the partials and tables of more splits than two for each block: 16 questions about one
# document of 64k tokens are 4,112 splits of 257 blocks, 70 MiB in a 4B model.
SHARED_SPLITS_SHARE = 0.01
# The most of the budget for splits of blocks that the host alone has room for. Two for each block would be 1 GiB beside
# 64 GiB of a model whose blocks are small, such as 0.75 MiB in all layers; what streams so much takes a second a step.
HOST_SPLITS_SHARE = 0.04


class Cost(NamedTuple):
    """What a candidate comes to: numbers of a `MemoryPlan`, by their names there.

    Attributes:
        lacks: what there is too little of, "limit" (of host memory: for its weights), "host", "host_kv", "gpu" or
            "length" (for `max_model_len`); None: it fits.
    """

    candidate: Candidate
    fixed_bytes: int
    streamed_bytes: int
    head_bytes: int
    landing_bytes: int
    expert_bytes: int
    embedding_bytes: int
    table_bytes: int
    num_expert_slots: int
    slot_rows: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_resident_blocks: int | None
    max_splits: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    lacks: str | None

    @property
    def host_weight_bytes(self) -> int:
        return self.streamed_bytes + self.expert_bytes + self.embedding_bytes + self.table_bytes


@dataclass(frozen=True, eq=False)
class Planner:
    """One model with its settings, on one device, with so much memory.

    may_pin: whether host memory can be pinned, as far as it is known. Experts in slots need it.
    rates: by which candidates are compared.
    is_quick: whether the smallest steps alone are tried, which says whether anything fits.
    """

    config: EngineConfig
    spec: ModelSpec
    device: Device
    budget_bytes: int
    host_available_bytes: int
    may_pin: bool = True
    rates: Rates = Rates()
    is_quick: bool = False

    # What may be chosen

    @cached_property
    def steps(self) -> list[int]:
        """The tokens of a prefill step that may be chosen, descending."""
        config, most = self.config, self.device.most_step_tokens
        if config.max_num_batched_tokens is not None:
            return [config.max_num_batched_tokens]
        sizes = [size for size in (8192, 4096, 2048, 1024, 512, 256) if size <= most]
        captured = max(config.capture_num_tokens or [], default=0)
        if captured > sizes[0]:
            raise ValueError(
                f"capture_num_tokens={config.capture_num_tokens!r} holds {captured}, and a prefill step has at most "
                f"{sizes[0]} tokens here: lower capture_num_tokens or set max_num_batched_tokens"
            )
        return [size for size in sizes if size >= captured][-1 if self.is_quick else 0 :]

    @cached_property
    def may_stream_head(self) -> bool:
        """Whether the head may lie in host memory: one that is tied to the embeddings where kernels read it there."""
        reads = self.device.is_host or self.device.reads_host_memory and self.may_pin
        return self.config.cpu_offload_gb != 0 and (reads or not self.spec.tied_embeddings)

    @property
    def may_stream(self) -> bool:
        """Whether weights may lie in host memory without being asked to."""
        return self.config.cpu_offload_gb != 0

    @cached_property
    def may_have_slots(self) -> bool:
        """Whether experts may have slots without being asked to."""
        gives_layers = self.config.resident_weights_limit is not None or self.config.cpu_offload_gb is not None
        return self.spec.sparse is not None and self.device.reads_host_memory and self.may_pin and not gives_layers

    @cached_property
    def embedding_bytes(self) -> int:
        """The bytes of embeddings that may lie in host memory; not of a tied head, which each step reads."""
        spec, reads = self.spec, self.device.reads_host_memory and self.may_pin
        return spec.embedding_bytes if reads and not spec.tied_embeddings and self.config.cpu_offload_gb != 0 else 0

    @cached_property
    def table_bytes(self) -> int:
        """The bytes of a table of what layers read of a token, which lies in host memory where that can be read."""
        return self.spec.table_bytes if self.device.reads_host_memory and self.may_pin else 0

    @cached_property
    def least(self) -> StreamedChoice:
        """What the settings alone ask to be streamed.

        The head comes behind all layers, or with a limit of what stays that is below its own bytes.
        """
        config, spec, may_stream_head = self.config, self.spec, self.may_stream_head
        of_layers, most = sum(spec.piece_bytes[1:]), len(spec.piece_bytes) - 1
        streamable = of_layers + spec.head_bytes * may_stream_head
        wanted, limit = int((config.cpu_offload_gb or 0) * GIB), config.resident_weights_limit
        if wanted > streamable:
            stays = "norms and" if may_stream_head else "the head, norms and"
            raise ValueError(
                f"cpu_offload_gb={config.cpu_offload_gb!r} is more than the {format_size(streamable)} of weights that "
                f"can be streamed: {stays} the first layer's queries, keys and values stay on the GPU. Give "
                f"at most {streamable / GIB:.2f}, or resident_weights_limit=0 to stream all that can be"
            )
        head = may_stream_head and (wanted > of_layers or limit is not None and limit < spec.head_bytes)
        wanted -= spec.head_bytes * (head and wanted > of_layers)
        if limit is not None:
            wanted = max(wanted, of_layers - limit)
        counts = range(most + 1)
        count = next(n for n in counts if sum(spec.piece_bytes[piece] for piece in spread(most + 1, n)) >= wanted)
        return StreamedChoice(count, head)

    def check_host_limit(self) -> None:
        """Raise ValueError for a limit of host memory that this machine cannot have, if KV is to lie there."""
        if self.config.may_offload and (self.config.host_memory_limit or 0) > self.host_available_bytes:
            raise ValueError(above_available(self.config, self.host_available_bytes))

    # What a choice comes to

    @cached_property
    def _ring_slot_bytes(self) -> int:
        config, layer = self.config, self.spec.layout.part_bytes
        if config.ring_slot_bytes is None:
            return max(DEFAULT_RING_SLOT_BYTES, layer)
        if config.ring_slot_bytes < layer:
            raise ValueError(
                f"ring_slot_bytes={config.ring_slot_bytes!r} cannot hold one layer of a KV block: give at least "
                f"{layer} bytes, or lower block_size={self.spec.block_size}"
            )
        return int(config.ring_slot_bytes)

    @cached_property
    def _sized(self) -> dict[int, MemoryPlan]:
        return {}

    @cached_property
    def _least(self) -> dict[int, int]:
        return {}

    def sized(self, tokens: int) -> MemoryPlan:
        """Return what a prefill step of so many tokens takes, all weights on the GPU, and without a pool."""
        if tokens not in self._sized:
            fixed = self.config, self.spec, self.budget_bytes, self._ring_slot_bytes, self.device
            self._sized[tokens] = sized_plan(*fixed, tokens)
        return self._sized[tokens]

    def num_blocks(self, candidate: Candidate) -> int:
        """Return the blocks of a candidate's pool, of which `cost` may leave less: an upper bound."""
        tokens, streamed, num_slots, embeddings = candidate
        gains = self.table_bytes + self.embedding_bytes * embeddings + sizes_of(self.spec, streamed).freed_bytes
        if num_slots:
            gains += self.spec.sparse.expert_bytes - slot_bytes(self.spec.sparse, num_slots)
        return most_blocks(self.sized(tokens), gains)

    def cost(self, candidate: Candidate) -> Cost:
        """Return what a candidate comes to, which depends on nothing else.

        Of host memory streamed weights are taken first, then KV blocks.
        """
        config, spec, sized = self.config, self.spec, self.sized(candidate.tokens)
        on_host, num_slots = sizes_of(spec, candidate.streamed), candidate.num_expert_slots
        experts = spec.sparse.expert_bytes if num_slots else 0
        embeddings = self.embedding_bytes * candidate.embeddings
        landing = slot_bytes(spec.sparse, num_slots) if num_slots else on_host.landing_bytes
        weights = on_host.num_bytes + experts + embeddings + self.table_bytes  # in host memory
        fixed, least = sized.fixed_bytes - weights + landing, self.least_blocks(candidate.tokens)
        blocks = self._pool(sized, least, most_blocks(sized, weights - landing))
        host_blocks, lacks = self._host_blocks(sized, weights, fixed)
        for splits in self._splits(sized, least, blocks, host_blocks):
            with_splits = self._with_splits(sized, fixed, blocks, splits)
            if with_splits >= least:
                break
        capacity = self._capacity(with_splits, host_blocks, sized.max_model_len)
        if lacks is None and with_splits < least:
            lacks = "gpu"
        if lacks is None and (config.max_model_len or 0) > capacity:
            lacks = "length"
        return Cost(
            candidate,
            fixed,
            on_host.num_bytes,
            spec.head_bytes * candidate.streamed.head,
            landing,
            experts,
            embeddings,
            self.table_bytes,
            num_slots,
            sized.slot_rows * (num_slots > 0),
            with_splits,
            host_blocks,
            sized.max_resident_blocks,
            splits,
            candidate.tokens,
            sized.max_num_seqs,
            capacity,
            lacks,
        )

    def plan(self, cost: Cost) -> MemoryPlan:
        """Return the plan of a candidate."""
        sized, numbers = self.sized(cost.candidate.tokens), cost._asdict()
        return replace(
            sized,
            streamed_pieces=sizes_of(self.spec, cost.candidate.streamed).pieces,
            weight_bytes=sized.weight_bytes - cost.host_weight_bytes,
            **{name: numbers[name] for name in numbers if name in MemoryPlan.__dataclass_fields__},
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that are to run at once at most: drafted tokens, which have rows as well, are none."""
        return self.config.max_num_seqs or self.sized(self.steps[0]).max_num_seqs

    def least_blocks(self, tokens: int) -> int:
        """Return the smallest useful pool beside steps of so many tokens."""
        if tokens not in self._least:
            self._least[tokens] = min_blocks(self.config, self.sized(tokens))
        return self._least[tokens]

    def _pool(self, sized: MemoryPlan, least: int, most: int) -> int:
        config, groups = self.config, self.spec.kv_groups
        if self.device.is_host or config.enable_cpu_offload is True:
            # A pool larger than all rows can fill is of no use: on the CPU it would take the user's own memory, and in
            # offload mode the host holds what does not fit.
            rows = (groups.most_blocks(sized.max_model_len) + len(groups)) * self.num_sequences
            longest = sized.max_model_len, self.num_sequences
            useful = rows + sized.step_reserve.resident_beside(*longest, UNBOUNDED) + 2
            most = min(most, max(useful, least))
        return min(most, config.num_gpu_blocks_override or most)

    def _host_blocks(self, sized: MemoryPlan, weights: int, fixed: int) -> tuple[int, str | None]:
        """Return the blocks of KV in host memory beside so many bytes of weights, and what there is too little of."""
        config, available, limit = self.config, self.host_available_bytes, self.config.host_memory_limit
        if weights > max(0, self.host_room(fixed)):
            return 0, "host"
        if limit is None:
            groups = self.spec.kv_groups
            most = groups.most_blocks(sized.max_model_len) * self.num_sequences
            most += sized.step_reserve.on_host_beside(sized.max_model_len, self.num_sequences, UNBOUNDED)
            return max(1, min(int((available - weights) * KV_SHARE) // sized.block_bytes, most)), None
        if weights and limit > available:
            return 0, "limit"
        if weights > limit:
            return 0, "host"
        num_blocks = (limit - weights) // sized.block_bytes
        lacks_kv = num_blocks < self._least_host_blocks and config.enable_cpu_offload is True
        return max(1, num_blocks), "host_kv" if lacks_kv else None

    @property
    def _least_host_blocks(self) -> int:
        return self.spec.kv_groups.most_blocks(self.config.max_model_len or self.spec.block_size)

    def host_room(self, fixed: int) -> int:
        """Return the bytes of host memory that there are beside so many of the device's."""
        return self.host_available_bytes - fixed * self.device.is_host  # on the CPU both are the same memory

    def _splits(self, sized: MemoryPlan, least: int, blocks: int, host_blocks: int) -> list[int]:
        """Return for how many splits there may be room beside such pools, descending."""
        config, rows = self.config, sized.max_num_seqs
        of_row = max(group.most_blocks(sized.max_model_len) for group in self.spec.kv_groups)
        held = min(of_row * rows, 2 * max(blocks, host_blocks) + rows)
        few = fewest = held
        if config.max_model_len is None or config.max_num_seqs is None:  # nobody asks for so many and so long ones
            share = int(HOST_SPLITS_SHARE * self.budget_bytes) // sized.split_bytes
            few = min(held, max(of_row, 2 * blocks + rows, share))
            fewest = min(held, max(of_row, 2 * least + rows))
        # Many rows may share one long beginning, and then attend to far more splits than there are blocks.
        shared = min(of_row * rows, int(SHARED_SPLITS_SHARE * self.budget_bytes) // sized.split_bytes)
        return [max(few, shared), few, fewest]

    def _with_splits(self, sized: MemoryPlan, fixed: int, num_blocks: int, max_splits: int) -> int:
        """Return the blocks beside room for so many splits. More than the pool counted on make it smaller."""
        room = (self.budget_bytes - fixed - max_splits * sized.split_bytes) // sized.block_bytes
        return min(num_blocks, max(0, room))

    def _capacity(self, gpu_blocks: int, host_blocks: int, longest: int) -> int:
        """Return the tokens that one sequence can have, of so many at the longest."""
        # Resident mode keeps a spare block, so that a preempted sequence can come back beside another one.
        blocks, config, groups = gpu_blocks - 1, self.config, self.spec.kv_groups
        if config.may_offload:
            blocks = host_blocks if config.enable_cpu_offload is True else max(blocks, host_blocks)
        return longest if groups.most_blocks(longest) <= blocks else groups.most_tokens(max(0, blocks))
