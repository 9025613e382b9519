"""What an engine may choose for its memory, and what each choice comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from nanoinfer.common.units import GIB, enough, format_size
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.candidates import Candidate, Streamed, placed, slot_bytes
from nanoinfer.memory.refusals import KV_SHARE, TooSmall, host_wanted, min_blocks
from nanoinfer.memory.sized import most_blocks, sized_plan
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.streamed import spread

DEFAULT_RING_SLOT_BYTES = 32 * 2**20
# Share of the budget for the partials and tables of more splits than two for each block: 16 questions about one
# document of 64k tokens are 4,112 splits of 257 blocks, 70 MiB in a 4B model.
SHARED_SPLITS_SHARE = 0.01


@dataclass(frozen=True)
class Cost:
    """What a candidate comes to.

    Attributes:
        plan: its bytes and sizes.
        lacks_host: makes the refusal of a candidate for which host memory is too small; None: it is not.
    """

    plan: MemoryPlan
    lacks_host: Callable[[], TooSmall] | None = None


@dataclass(frozen=True, eq=False)
class Planner:
    """One model with its settings, on one device, with so much memory.

    may_pin: whether host memory can be pinned, as far as it is known. Experts in slots need it.
    """

    config: EngineConfig
    spec: ModelSpec
    device: Device
    budget_bytes: int
    host_available_bytes: int
    may_pin: bool = True

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
        return [size for size in sizes if size >= captured]

    @cached_property
    def may_stream_head(self) -> bool:
        """Whether the head may lie in host memory: one that is tied to the embeddings where kernels read it there."""
        reads = self.device.is_host or self.device.reads_host_memory and self.may_pin
        return self.config.cpu_offload_gb != 0 and (reads or not self.spec.tied_embeddings)

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
    def least(self) -> Streamed:
        """What the settings alone ask to be streamed.

        The head comes behind all layers, or with a limit of what stays that is below its own bytes.
        """
        config, spec, may_stream_head = self.config, self.spec, self.may_stream_head
        of_layers, most = sum(spec.piece_bytes[1:]), len(spec.piece_bytes) - 1
        streamable = of_layers + spec.head_bytes * may_stream_head
        wanted, limit = int((config.cpu_offload_gb or 0) * GIB), config.resident_weights_limit
        if wanted > streamable:
            stays = "norms and" if may_stream_head else "the head, norms and"
            raise TooSmall(
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
        return Streamed(count, head)

    # What a choice comes to

    @cached_property
    def _ring_slot_bytes(self) -> int:
        config, layer = self.config, self.spec.layout.layer_block_bytes
        if config.ring_slot_bytes is None:
            return max(DEFAULT_RING_SLOT_BYTES, layer)
        if config.ring_slot_bytes < layer:
            raise ValueError(
                f"ring_slot_bytes={config.ring_slot_bytes!r} cannot hold one layer of a KV block: give at least "
                f"{layer} bytes, or lower block_size={config.block_size}"
            )
        return int(config.ring_slot_bytes)

    @cached_property
    def _sized(self) -> dict[int, MemoryPlan]:
        return {}

    def sized(self, tokens: int) -> MemoryPlan:
        """Return what a prefill step of so many tokens takes, all weights on the GPU, and without a pool."""
        if tokens not in self._sized:
            given = self.config, self.spec, self.budget_bytes, self._ring_slot_bytes, self.device
            self._sized[tokens] = sized_plan(*given, tokens)
        return self._sized[tokens]

    def blocks_with(self, candidate: Candidate) -> int:
        """Return the blocks of a candidate's pool, but for what `cost` takes of them yet: an upper bound."""
        tokens, streamed, num_slots, embeddings = candidate
        gains = self.embedding_bytes * embeddings + placed(self.spec, streamed).freed_bytes
        if num_slots:
            gains += self.spec.sparse.expert_bytes - slot_bytes(self.spec.sparse, num_slots)
        return most_blocks(self.sized(tokens), gains)

    def cost(self, candidate: Candidate) -> Cost:
        """Return the plan of a candidate, which depends on nothing else."""
        return self._with_host(self._on_gpu(candidate))

    def _on_gpu(self, candidate: Candidate) -> MemoryPlan:
        """Return the plan with its pool, and what is streamed, has slots or lies in host memory."""
        config, spec, sized = self.config, self.spec, self.sized(candidate.tokens)
        on_host, num_slots = placed(spec, candidate.streamed), candidate.num_expert_slots
        expert_bytes = spec.sparse.expert_bytes if num_slots else 0
        embedding_bytes = self.embedding_bytes * candidate.embeddings
        plan = replace(
            sized,
            streamed_pieces=on_host.pieces,
            head_bytes=spec.head_bytes * candidate.streamed.head,
            streamed_bytes=on_host.num_bytes,
            num_expert_slots=num_slots,
            expert_bytes=expert_bytes,
            slot_rows=sized.slot_rows * (num_slots > 0),
            embedding_bytes=embedding_bytes,
            weight_bytes=sized.weight_bytes - on_host.num_bytes - expert_bytes - embedding_bytes,
            place_bytes=slot_bytes(spec.sparse, num_slots) if num_slots else on_host.place_bytes,
        )
        num_blocks, max_blocks = most_blocks(plan), -(-plan.max_model_len // config.block_size)
        if self.device.is_host or config.enable_cpu_offload is True:
            # A pool larger than all rows can fill is of no use: on the CPU it would take the user's own memory, and in
            # offload mode the host holds what does not fit.
            useful = max_blocks * plan.max_num_seqs + plan.max_num_seqs + 2
            num_blocks = min(num_blocks, max(useful, min_blocks(config, plan)))
        num_blocks = min(num_blocks, config.num_gpu_blocks_override or num_blocks)
        return replace(plan, num_gpu_blocks=num_blocks)

    def _with_host(self, plan: MemoryPlan) -> Cost:
        """Divide host memory: streamed weights first, then KV blocks."""
        config, available = self.config, self.host_available_bytes
        most = -(-plan.max_model_len // config.block_size) * plan.max_num_seqs
        streamed, limit = plan.host_weight_bytes, config.host_memory_limit
        if limit is not None and limit > available and (config.may_offload or streamed > 0):
            raise ValueError(
                f"host_memory_limit={config.host_memory_limit!r} is {limit / GIB:.2f} GiB, "
                f"{available / GIB:.2f} GiB are available: lower host_memory_limit"
            )
        # On the CPU both are the same memory.
        room = max(0, available - plan.fixed_bytes * plan.is_taken_as_needed)
        if streamed > room:
            return Cost(plan, lambda: TooSmall(host_wanted(replace(config, host_memory_limit=None), plan, room)))
        if streamed > (available if limit is None else limit):
            return Cost(plan, lambda: TooSmall(host_wanted(config, plan, available)))
        if limit is not None:
            num_blocks = (limit - streamed) // plan.block_bytes
            wanted = config.max_model_len or config.block_size
            smallest = -(-wanted // config.block_size)
            if num_blocks < smallest and config.enable_cpu_offload is True:
                return Cost(plan, lambda: self._lacks_kv(wanted, smallest * plan.block_bytes, streamed))
        else:
            num_blocks = min(int((available - streamed) * KV_SHARE) // plan.block_bytes, most)
        plan = replace(plan, num_host_blocks=max(1, num_blocks))
        fewest = min(most, 2 * max(plan.num_gpu_blocks, plan.num_host_blocks) + plan.max_num_seqs)
        # Many rows may share one long beginning, and then attend to far more splits than there are blocks.
        shared = min(most, max(fewest, int(SHARED_SPLITS_SHARE * plan.budget_bytes) // plan.split_bytes))
        generous = _with_splits(plan, shared)
        if generous.num_gpu_blocks >= min_blocks(config, generous):
            return Cost(generous)
        return Cost(_with_splits(plan, fewest))

    def _lacks_kv(self, tokens: int, num_bytes: int, streamed: int) -> TooSmall:
        limit = self.config.host_memory_limit
        beside = f" beside {format_size(streamed)} of weights" if streamed else ""
        return TooSmall(
            f"host_memory_limit={limit!r} is too small{beside}: the KV cache of {tokens} tokens "
            f'takes {format_size(num_bytes)}: give at least "{enough(num_bytes + streamed)}"'
        )

    def capacity(self, plan: MemoryPlan) -> int:
        """Return the tokens that one sequence can have."""
        # Resident mode keeps a spare block, so that a preempted sequence can come back beside another one.
        blocks, config = plan.num_gpu_blocks - 1, self.config
        if config.may_offload:
            blocks = plan.num_host_blocks if config.enable_cpu_offload is True else max(blocks, plan.num_host_blocks)
        return blocks * config.block_size

    def lacks_length(self, plan: MemoryPlan) -> TooSmall | None:
        """Return the refusal of a plan that cannot hold one sequence of `max_model_len`; None: it can."""
        config, capacity = self.config, self.capacity(plan)
        if config.max_model_len is None or config.max_model_len <= capacity:
            return None
        wanted = -(-config.max_model_len // config.block_size) * plan.block_bytes
        return TooSmall(
            f"max_model_len={config.max_model_len} needs a KV cache of {format_size(wanted)}, and "
            f"{format_size(capacity // config.block_size * plan.block_bytes)} fit: lower max_model_len to at most "
            f"{capacity} or raise {'host_memory_limit' if config.may_offload else 'gpu_memory_limit'}"
        )


def _with_splits(plan: MemoryPlan, max_splits: int) -> MemoryPlan:
    """Return the plan with room for `max_splits` splits. More than the pool counted on make it smaller."""
    room = (plan.budget_bytes - plan.fixed_bytes - max_splits * plan.split_bytes) // plan.block_bytes
    return replace(plan, num_gpu_blocks=min(plan.num_gpu_blocks, max(0, room)), max_splits=max_splits)
