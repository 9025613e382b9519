"""What plans are compared by: the seconds until requests of some context are done, their prompts and their answers."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

from nanoinfer.config import EngineConfig
from nanoinfer.memory.floors import sparse_layers_seconds
from nanoinfer.memory.rates import Rates
from nanoinfer.models.base import ModelSpec
from offload.reserve import StepReserve

ANSWER_TOKENS = 256
DEFAULT_CONTEXT = 32_768
# The host launches about ten kernels for a layer of a step, in some five microseconds each.
_LAUNCH_SECONDS = 50e-6


class Spent(Protocol):
    """What is read of a `MemoryPlan`, or of a candidate's cost."""

    num_gpu_blocks: int
    num_host_blocks: int
    max_resident_blocks: int | None
    max_splits: int
    max_model_len: int
    max_num_batched_tokens: int
    streamed_bytes: int
    head_bytes: int
    num_expert_slots: int
    expert_bytes: int
    slot_rows: int
    embedding_bytes: int
    table_bytes: int


class _Counts(NamedTuple):
    """The blocks of a row of some context: those that are full, all, and the most of either until it has so many.

    splits: those that one layer attends to at most.
    """

    full: int
    all: int
    most_full: int
    most: int
    splits: int


class Measure:
    """The measure of plans for one model with its settings.

    Rows may be fractions here: some of the time there is one more.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, rates: Rates) -> None:
        self.config, self.spec, self.rates = config, spec, rates
        self.context = config.max_model_len or min(DEFAULT_CONTEXT, spec.max_position)
        self._groups = spec.kv_groups
        self._counts: dict[int, _Counts] = {}

    def seconds(self, plan: Spent, num_requests: int) -> float:
        """Return how long it takes until so many requests are done, all of which are there from the beginning.

        A context that the plan cannot hold is asked for in as many requests as it takes; where KV may lie on the host
        so that it can be held, these count as often again. With "auto" it is the mode in which it takes less time: a
        plan is no worse for what the host could hold besides.
        """
        context = min(self.context, plan.max_model_len)
        parts, answer, times = self.context / context, min(ANSWER_TOKENS, context // 2), []
        for rows in {min(num_requests, max(1.0, rows)) for rows in self._rows(plan, context)}:
            decode = num_requests / rows * answer * self.step_seconds(plan, rows, context)
            times.append(decode + self._prompt_seconds(plan, rows, num_requests, context - answer))
        return min(times) * parts ** (2 if self.config.may_offload else 1)

    def holds_all(self, plan: Spent) -> bool:
        """Whether all sequences that the settings ask for are held at once, as long as they may be."""
        return max(self._rows(plan, self.context)) >= self.config.max_num_seqs

    def step_seconds(self, plan: Spent, rows: float, context: int) -> float:
        """Return the least time of a decode step; experts are taken to be chosen equally often.

        A missing expert is waited for; KV and layers pass beside what is computed.
        """
        passing = plan.streamed_bytes + self._kv_blocks(plan, rows, context) * self.spec.layout.block_bytes
        read = self._bytes_read(rows, context)
        seconds = max(passing / self.rates.link, read / self.rates.device)
        return seconds + self._missed_bytes(plan, rows) / self.rates.link + sparse_layers_seconds(self.spec)

    def _bytes_read(self, rows: float, context: int) -> float:
        """Return the bytes that a step reads on the device; of whole rows these are `bytes_read_per_step`."""
        spec = self.spec
        unread = spec.unread_bytes
        if spec.sparse is not None:
            unread += spec.sparse.expert_bytes * (1 - spec.sparse.chosen_share(rows))
        return spec.weight_bytes - unread + rows * (_kv_bytes(spec, context) + spec.state_bytes)

    def _rows(self, plan: Spent, context: int) -> list[float]:
        """Return how many sequences of this length run at once, in each mode that there is."""
        config, groups, on_gpu = self.config, self._groups, plan.num_gpu_blocks - 1
        blocks, full = self._counted(context).most, max(1, self._counted(context).most_full)
        # Steps have a reserve beside the rows; one row alone has what there is.
        reserve, num_host = StepReserve(groups, plan.max_num_batched_tokens), plan.num_host_blocks
        beside = num_host - reserve.on_host_beside(context, 2, num_host)
        on_host = min(max(min(num_host, full), beside) / full, plan.max_splits / self._counted(context).splits)
        beside = on_gpu - reserve.resident_beside(context, 2, on_gpu)
        resident = max(min(on_gpu, blocks), beside) / blocks
        if config.enable_cpu_offload is True:
            return [on_host]
        # Offload mode must hold whatever resident mode holds, or is not entered.
        may_spill = config.may_offload and (
            self._counted(plan.max_model_len).most_full <= plan.num_host_blocks
            or groups.most_full(min(plan.max_model_len, groups.most_tokens(on_gpu))) <= plan.num_host_blocks
        )
        return [resident, on_host] if may_spill else [resident]

    def _kv_blocks(self, plan: Spent, rows: float, context: int) -> float:
        """Return the full blocks that stay in host memory alone; of whole rows these are `num_streamed`."""
        counts = self._counted(context)
        num_full, num_all = rows * counts.full, rows * counts.all
        room = plan.num_gpu_blocks - 1
        most = num_full
        if num_all > room and self.config.may_offload:
            most = max(0, room - rows * len(self._groups))
        elif self.config.enable_cpu_offload is not True:
            return 0
        return max(0, num_full - (most if plan.max_resident_blocks is None else min(most, plan.max_resident_blocks)))

    def _missed_bytes(self, plan: Spent, rows: float) -> float:
        if not plan.num_expert_slots:
            return 0.0
        sparse = self.spec.sparse
        return plan.expert_bytes * sparse.chosen_share(rows) * (1 - plan.num_expert_slots / sparse.num_experts)

    def _prompt_seconds(self, plan: Spent, rows: float, num_requests: int, tokens: int) -> float:
        """Return how long the prompts take: what is computed, and what passes over the link meanwhile."""
        rates, spec, step_tokens = self.rates, self.spec, plan.max_num_batched_tokens
        num_steps = -(-num_requests * tokens // step_tokens)
        # No plan is better for attention that it cannot do.
        products = _products(spec, self.context) * tokens / self.context
        operations = 2 * tokens * self._weights_of_token + 4 * products
        computed = num_requests * operations / rates.products
        computed += num_steps * self._weights_read / rates.device
        in_each, waited = plan.streamed_bytes - plan.head_bytes, 0.0
        if min(step_tokens, num_requests * tokens) > plan.slot_rows:
            in_each += plan.expert_bytes
        else:
            waited = num_steps * self._missed_bytes(plan, min(step_tokens, num_requests * tokens)) / rates.link
        passing = num_steps * in_each + num_requests * plan.head_bytes
        looked_up = spec.hidden_size * (plan.embedding_bytes > 0) + spec.layer_inputs_size * (plan.table_bytes > 0)
        passing += num_requests * tokens * looked_up * spec.dtype.itemsize
        # A step attends to all that came before it: what of that is not on the GPU passes in each of them.
        blocks = self._kv_blocks(plan, rows, tokens) / rows
        beyond = blocks / self._blocks_of_token
        if beyond:
            passing += num_requests * beyond / (2 * step_tokens) * blocks * spec.layout.block_bytes
        launched = num_steps * len(spec.layers) * _LAUNCH_SECONDS
        return max(computed, passing / rates.link, launched) + waited

    def _counted(self, context: int) -> _Counts:
        """Kept: many plans are compared for a few contexts."""
        if context not in self._counts:
            groups = self._groups
            counts = groups.num_full(context), groups.num_blocks(context)
            splits = max(group.most_blocks(context) for group in groups)
            self._counts[context] = _Counts(*counts, groups.most_full(context), groups.most_blocks(context), splits)
        return self._counts[context]

    @cached_property
    def _blocks_of_token(self) -> float:
        """The blocks that a token adds to a long row."""
        sizes = [group.block_size for group in self._groups if group.window is None]
        return sum(1 / size for size in sizes) or 1 / self.spec.block_size

    @cached_property
    def _weights_of_token(self) -> int:
        """The numbers of the layers' weights that a token is multiplied with."""
        spec, hidden = self.spec, self.spec.hidden_size
        of_q = 3 if spec.gates_attention else 2
        count = spec.state_weights + hidden * sum(of_q * attention.q_size for attention in spec.attention_of)
        for layer in spec.kv_layers:
            attention = spec.attentions[spec.layers[layer].shape]
            count += hidden * attention.kv_size * (1 if attention.has_one_projection else 2)
        count += (3 if spec.mlp_width > 1 else 2) * hidden * sum(spec.mlp_sizes)
        if spec.sparse is not None:
            inner = spec.sparse.num_chosen * spec.sparse.intermediate_size + spec.sparse.shared_size
            count += spec.sparse.num_layers * 3 * hidden * inner
        return count

    @cached_property
    def _weights_read(self) -> int:
        """The bytes of the layers' weights, all of which a step of many tokens reads."""
        spec = self.spec
        head = spec.head_bytes * (not spec.tied_embeddings)
        return spec.weight_bytes - spec.embedding_bytes - spec.table_bytes - head


@lru_cache(maxsize=4096)
def _kv_bytes(spec: ModelSpec, context: int) -> int:
    """As `ModelSpec.kv_bytes`, kept: plans of a few contexts are compared."""
    return spec.kv_bytes(context)


@lru_cache(maxsize=4096)
def _products(spec: ModelSpec, tokens: int) -> float:
    """Return the values of queries that a prompt multiplies with keys, of all layers."""
    pairs = zip(spec.windows, spec.attention_of, strict=True)
    return sum(attention.q_size * tokens * min(tokens / 2, window or tokens) for window, attention in pairs)
