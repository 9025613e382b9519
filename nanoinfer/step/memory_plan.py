"""The memory that an engine may take on its device, and that torch holds there."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.common.units import format_gib, format_size
from offload import KVGroups
from offload.reserve import StepReserve


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What each part of the engine takes, in bytes, and the sizes that follow; 0 until it is worked out.

    Attributes:
        activation_bytes: transient memory of the largest prefill step, or of sampling if that takes more.
        slice_rows: rows of logits that are made at a time for log-probabilities of prompts; those of a slice are
            counted with the prefill step.
        workspace_bytes: fixed buffers of decode and of small prefill steps, and tables, without the attention partials
            of whole blocks.
        weight_bytes: of those that stay on the GPU, with position tables and the buffer for a matrix.
        landing_bytes: the landing buffers of streamed weights on the GPU, for two pieces at a time; or the pool of
            experts with slots.
        matrix_bytes: of the matrices of packed weights, where they are kept and not written for each product.
        library_bytes: workspaces of libraries, and rounding.
        graph_bytes: private memory of the captured graphs.
        split_bytes: attention partials of one split, and its entries in tables.
        groups: of layers, each with KV blocks of its own.
        num_gpu_blocks: KV blocks of the GPU pool, the scratch block included.
        max_resident_blocks: full blocks that may stay on the GPU in offload mode; None: as many as there is room for.
        streamed_pieces: the pieces whose weights lie in host memory.
        head_bytes: of the head, with embeddings that are tied to it, where it is streamed; else 0.
        streamed_bytes: of these pieces and this head.
        num_expert_slots, expert_bytes: how many experts of a sparse layer may lie on the GPU while all lie in host
            memory, and the bytes of all; 0: each lies on the GPU, or is streamed with its layer.
        slot_rows: the most rows of a step that brings single experts.
        embedding_bytes: of the embeddings, where these lie in host memory and the GPU reads rows there; else 0.
        table_bytes: of a table of what layers read of a token, likewise.
        max_splits: splits of whole blocks that one decode step may attend to.
        step_unit: as in `ModelSpec`.
        num_state_slots: sequences of which layers may keep states at a time.
        num_draft_slots: states beside these, for drafted tokens, which also have those that no sequence has.
        num_lines: rows and drafted tokens that a step is to have room for together; 0: there are no drafts.
        is_taken_as_needed: memory for KV is taken page by page as requests fill it, as on the CPU.
    """

    budget_bytes: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    workspace_bytes: int = 0
    library_bytes: int = 0
    graph_bytes: int = 0
    ring_bytes: int = 0
    landing_bytes: int = 0
    matrix_bytes: int = 0
    block_bytes: int = 0
    split_bytes: int = 0
    num_ring_slots: int = 0
    blocks_per_slot: int = 0
    groups: KVGroups = KVGroups()
    num_gpu_blocks: int = 0
    num_host_blocks: int = 0
    max_resident_blocks: int | None = None
    max_splits: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    num_state_slots: int = 0
    num_draft_slots: int = 0
    num_lines: int = 0
    step_unit: int = 0
    max_num_batched_tokens: int = 0
    slice_rows: int = 0
    streamed_pieces: tuple[int, ...] = ()
    head_bytes: int = 0
    streamed_bytes: int = 0
    num_expert_slots: int = 0
    expert_bytes: int = 0
    slot_rows: int = 0
    embedding_bytes: int = 0
    table_bytes: int = 0
    is_taken_as_needed: bool = False

    @property
    def max_running(self) -> int:
        """Sequences that run at once at most. Rows beyond these are for drafted tokens, or lack a slot for states."""
        return min(self.max_num_seqs, self.num_state_slots)

    @property
    def num_slots(self) -> int:
        """Slots for states."""
        return self.num_state_slots + self.num_draft_slots

    @property
    def step_reserve(self) -> StepReserve:
        """What is kept of a pool of KV blocks for prefill steps."""
        return StepReserve(self.groups, self.max_num_batched_tokens)

    @property
    def fixed_bytes(self) -> int:
        """All but the KV pool and the partials that grow with it."""
        buffers = self.workspace_bytes + self.library_bytes + self.graph_bytes
        weights = self.weight_bytes + self.landing_bytes + self.matrix_bytes
        return weights + self.activation_bytes + self.ring_bytes + buffers

    @property
    def pool_bytes(self) -> int:
        """The KV pool on the GPU, with the attention partials of all that can be attended to."""
        return self.num_gpu_blocks * self.block_bytes + self.max_splits * self.split_bytes

    @property
    def total_bytes(self) -> int:
        """What the engine takes on the GPU at its peak."""
        return self.fixed_bytes + self.pool_bytes

    @property
    def host_weight_bytes(self) -> int:
        """Of the weights in host memory."""
        return self.passing_bytes + self.read_there_bytes

    @property
    def read_there_bytes(self) -> int:
        """Of the weights in host memory of which the GPU reads rows where they lie."""
        return self.embedding_bytes + self.table_bytes

    @property
    def passing_bytes(self) -> int:
        """Of the weights in host memory that pass to the GPU, each step or as they are chosen."""
        return self.streamed_bytes + self.expert_bytes

    @property
    def host_bytes(self) -> int:
        """Of KV blocks."""
        return self.num_host_blocks * self.block_bytes

    def one_line(self, mode: str) -> str:
        """Return the plan as the engine prints it at start-up: what is short, what a user meets, where memory goes."""
        gib, steps = format_gib, f"Prefill steps of {self.max_num_batched_tokens:,} tokens, {mode} mode"
        contexts = f"up to {self.max_model_len:,} tokens (max_model_len)"
        if self.is_taken_as_needed:
            held = self.weight_bytes + self.matrix_bytes
            rest = self.total_bytes - held + self.host_bytes
            return (
                f"contexts of {contexts}. Weights take {format_size(held)}, requests up to {format_size(rest)} more: "
                f"gpu_memory_limit and host_memory_limit lower that. {steps}"
            )
        begin, landing, on_host = f"contexts of {contexts}, all weights on the GPU", "", []
        if self.streamed_bytes:
            begin = f"{format_size(self.streamed_bytes)} of weights stream in each step"
            landing = f", places for these {gib(self.landing_bytes)}"
            on_host.append(f"weights {'and head ' * bool(self.head_bytes)}{gib(self.streamed_bytes)}")
        if self.num_expert_slots:
            begin = f"{self.num_expert_slots} experts of each layer are on the GPU, others come when they are chosen"
            landing = f", these experts {gib(self.landing_bytes)}"
            on_host.append(f"all experts {gib(self.expert_bytes)}")
        if landing:
            begin += f": nanoinfer plan says what would help. Contexts of {contexts}"
        if self.read_there_bytes:
            on_host.append(f"embeddings {gib(self.read_there_bytes)}")
        if self.host_bytes:
            on_host.append(f"KV up to {gib(self.host_bytes)}")
        buffers = self.workspace_bytes + self.library_bytes + self.graph_bytes
        return (
            f"{begin}. {gib(self.total_bytes)} of {gib(self.budget_bytes)} GiB of GPU memory: weights "
            f"{gib(self.weight_bytes)}{landing}, KV cache {gib(self.pool_bytes)}, ring {gib(self.ring_bytes)}, "
            f"working memory {gib(self.activation_bytes)}, buffers and graphs {gib(buffers)}. "
            + f"In host memory: {', '.join(on_host)} GiB. " * bool(on_host)
            + steps
        )
