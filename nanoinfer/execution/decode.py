"""Decode: one token for each row of a padded batch, as sections of pieces that run eagerly or from captured graphs.

A section (`execution/pieces.py`) holds pieces and their attention over the GPU pool. Between two sections, attention
over ring slots may add more splits; the next section merges all splits. The last one ends with the logits. A step that
streams nothing is one section, and so one graph. Sampling is another one, in every step. So all modes run the same
kernels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

from nanoinfer.execution.decode_attention import DecodeAttention
from nanoinfer.execution.graphs import GraphWork
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.splits import NO_SPLITS
from nanoinfer.execution.tables import DeviceTable, RowState
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.models.step_tensors import FixedBuffers, StepTensors
from nanoinfer.step.plan import StepPlan
from offload import Chunk, OffloadStep, StreamPlan
from offload.layout import runs


@dataclass
class DecodeCounters:
    """Running totals of decode steps."""

    graph_replays: int = 0
    eager_steps: int = 0
    padded_rows: int = 0
    num_rows: int = 0


class DecodeProgram:
    """Buffers, tables and pieces of decode, and the state of all rows.

    Attributes:
        batch_sizes: padded batch sizes, ascending; a larger batch runs eagerly and unpadded.
        section_ends: as in `OffloadStep`, of a step in which no KV streams, and of one in which it may everywhere.
        num_live, batch_rows: [1] and [max_batch] int32, how many rows the batch has, and their numbers.
        last: the step whose lists the tables hold, if another may repeat it.
    """

    def __init__(self, resources: Resources) -> None:
        spec, device, groups = resources.model.spec, resources.runtime.device, resources.groups
        self.resources, self._compute = resources, resources.compute
        max_num_seqs = resources.memory_plan.max_num_seqs
        self.batch_sizes = resources.config.graph_batch_sizes(max_num_seqs, resources.device)
        max_batch = max(self.batch_sizes[-1], max_num_seqs)
        self.rows = rows = RowState(resources.runtime, max_num_seqs, len(groups) * resources.table_width)
        self.sampling = SamplingState(resources.runtime, rows, spec.vocab_size, max_batch)
        self.counters = DecodeCounters()
        self.logits = torch.zeros(max_batch, spec.vocab_size, dtype=spec.dtype, device=device)
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._buffers = FixedBuffers(spec, max_batch, device)
        self._next = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = self._buffers.positions
        self._slots = torch.zeros(len(groups), max_batch, dtype=torch.int64, device=device)
        self._block_sizes = torch.tensor([group.block_size for group in groups], dtype=torch.int32, device=device)
        self._lengths = torch.ones(max_batch, dtype=torch.int32, device=device)
        tables = len(groups), max_batch, resources.table_width
        self._block_tables = torch.zeros(tables, dtype=torch.int32, device=device)
        # How many rows are live; their numbers, and where a layer keeps states of them and finds those before.
        num_columns = 4 if resources.states.of_layer else 1
        self.batch = DeviceTable(resources.runtime, 4 + num_columns * max_batch)
        self.num_live, columns = self.batch.tensor[:1], self.batch.tensor[4:].view(num_columns, max_batch)
        self.batch_rows, self._runs = columns[0], None
        if resources.states.of_layer:
            every = torch.from_numpy(np.arange(max_batch, dtype=np.int32)).to(device)
            self._runs = StateRuns(*columns[1:], every[:0], every)
        self.attention = DecodeAttention(resources, self._buffers.queries, self._lengths, self._block_tables)
        self.section_ends = resources.pieces.ends_without_kv, resources.pieces.ends_with_kv
        self.last: DecodeStep | None = None

    # Sections

    def run_pieces(self, indices: Sequence[int], size: int, whole_rows: bool) -> None:
        """Run pieces of a padded batch of `size` rows, one after the other, on the current stream.

        They may become a graph, so what they leave for the next one lies at fixed addresses.

        whole_rows: whether attention takes whole rows of the GPU pool, in place of splits.
        """
        pieces, tensors, hooks = self.resources.pieces, self._tensors(size), _DecodeHooks(self, whole_rows)
        for index in indices:
            pieces.run_with_hooks(index, tensors, hooks)
        # The first piece and the last one replace x by a new tensor; later graphs read the fixed buffer.
        if indices[-1] < len(pieces.cuts) - 1 and not {0, len(pieces) - 1}.isdisjoint(indices):
            self._buffers.x[:size].copy_(tensors.x)
        if indices[-1] < len(pieces) - 1 and pieces.attention_at[indices[-1]] is None:
            self._buffers.normed[:size].copy_(tensors.normed)

    def run_section(self, streams_kv: bool, section: int, size: int) -> None:
        """Run a section of a step on the current stream.

        streams_kv: of a step in which KV may stream at every attention.
        """
        ends = self.section_ends[streams_kv]
        indices = range(ends[section - 1] + 1 if section else 0, ends[section] + 1)
        self.run_pieces(indices, size, self.attention.whole_rows and not streams_kv)

    def sample(self, size: int) -> None:
        """Sample the next token of each row of a padded batch of `size` rows, whose logits the last piece has left."""
        self.sampling.sample(self.logits[:size], self.batch_rows[:size], self.tokens[:size])

    def _tensors(self, size: int) -> StepTensors:
        fixed, runs = self._buffers.first(size), self._runs and StateRuns(*(one[:size] for one in self._runs))
        return StepTensors(
            self._next[:size], self._positions[:size], self._slots[:, :size], self.num_live, runs, **fixed
        )

    def copy_inputs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, whole_rows: bool
    ) -> None:
        """Write the batch's next token ids, positions and slots for a `MixedStep` to compute, all int32.

        token_ids, positions: [rows]; slots: [groups, rows].
        """
        count = len(token_ids)
        self.prepare(count, whole_rows)
        token_ids.copy_(self._next[:count])
        positions.copy_(self._positions[:count])
        slots.copy_(self._slots[:, :count])

    def copy_queries(self, q: torch.Tensor) -> None:
        """Copy the batch's queries, [rows, num_q_heads, head_dim], to where attention over ring slots reads them."""
        self._buffers.queries[: q.numel()].view_as(q).copy_(q)

    def prepare(self, size: int, whole_rows: bool) -> None:
        """Fill in the tokens, lengths, positions and slots of the batch."""
        rows, state = self.batch_rows[:size], self.rows
        if whole_rows:
            tables = state.block_table.index_select(0, rows).unflatten(1, (len(self._block_tables), -1))
            self._block_tables[:, :size].copy_(tables.transpose(0, 1))
        inputs = self._next[:size], self._lengths[:size], self._positions[:size], self._slots[:, :size]
        state.operations.step_inputs(rows, state.tensors, inputs, self._block_sizes)

    # Graphs

    def run_each_kind(self) -> None:
        """Run pieces that together use every kernel of a step, for each kind of batch, on padding rows."""
        self._reset_tables()
        pieces = self.resources.pieces
        indices = [*pieces.one_of_each_kind, *pieces.piece_indices(True)[len(pieces) :]]
        beyond = [size for size in self.batch_sizes if size > MAX_ROWS]
        for size in [size for size in self.batch_sizes if size <= MAX_ROWS] + beyond[:1] + beyond[-1:]:
            self.run_pieces(indices, size, whole_rows=False)
            self.sample(size)
        mask = torch.full((1, 1 + -(-self.logits.shape[1] // 32)), -1, dtype=torch.int32, device=self.logits.device)
        mask[0, 0] = 0
        self.rows.operations.apply_masks(self.logits[:1], mask)

    def works(self, may_offload: bool) -> Iterator[GraphWork]:
        """Yield the work to capture, the largest batch first, so that the memory that all graphs share grows only once.

        There are the sections of a step without KV from the host, and the sampling, for each batch size; with
        `may_offload` also the sections of a step in which KV streams at every attention, and the attention over each
        ring slot.
        """
        sizes, prepare = self.batch_sizes[::-1], self._reset_tables
        for size in sizes:
            yield self._sections(False, size)
            yield GraphWork(("sample", size), f"sampling graph, batch {size}", prepare, [partial(self.sample, size)])
        for size in sizes if may_offload else ():
            yield self._sections(True, size)
        ring_slots = range(self.resources.ring.num_ring_slots)
        for slot in product(sorted(set(self.attention.slot_kinds)), ring_slots) if may_offload else ():
            yield GraphWork(("slot", *slot), "ring slot graphs", prepare, [partial(self.attention.attend_slot, *slot)])

    def _sections(self, streams_kv: bool, size: int) -> GraphWork:
        sections = range(len(self.section_ends[streams_kv]))
        launches = [partial(self.run_section, streams_kv, section, size) for section in sections]
        key, what = _key_of_sections(streams_kv, size), f"decode graphs, batch {size}"
        return GraphWork(key, what, self._reset_tables, launches)

    def _reset_tables(self) -> None:
        """Fill the tables with padding rows only, for the warm-up run before a capture to compute."""
        self.last = None
        nobody = np.zeros(0, dtype=np.int32)
        self._set_batch(nobody, nobody, nobody, len(self.tokens))
        num_groups = len(self.resources.groups)
        self.attention.upload([NO_SPLITS] * num_groups, [[]] * num_groups)

    def _set_batch(self, rows: np.ndarray, state_slots: np.ndarray, num_lines: np.ndarray, size: int) -> None:
        """Upload the rows of a batch, as in `StepPlan`, padded to `size`."""
        table = np.full(4 + size, self.rows.padding_row, dtype=np.int32)
        table[:4], table[4 : 4 + len(rows)] = len(rows), rows
        if self._runs is not None:
            columns = np.full((4, len(self.tokens)), self.resources.states.padding_slot, dtype=np.int32)
            columns[0, :size], ends = table[4:], np.cumsum(num_lines)
            columns[1, : len(rows)] = state_slots
            columns[2:, : len(rows)] = np.repeat([ends - num_lines, ends], num_lines, axis=1)
            table = np.concatenate([table[:4], columns.reshape(-1)])
        self.batch.set(self._compute, table)

    def forget_tables(self) -> None:
        """Have all tables uploaded again: after an exception, those on the device may hold anything."""
        self.last = None
        self.batch.forget()
        self.attention.forget_tables()

    # Steps

    def begin(self, step: StepPlan, beside: Sequence[list[Chunk]] | None = None) -> DecodeStep:
        """Upload what changed and plan what the rows that decode attend to.

        Args:
            beside: for each group the KV chunks of the prefill step of the same mixed step; their blocks are attended
                to from there.

        The lists of splits change only when a row comes or goes, gains or loses a GPU block, or begins a split (in
        short rows a tile of one). Until then this method returns the same `DecodeStep` again. After an exception here
        call `forget_tables`: some of the tables may hold this step's lists.
        """
        assert np.all(step.ends - step.begins == 1), "a decoding row computes one token"
        rows, first = step.rows, len(step.chunks)
        size = next((size for size in self.batch_sizes if size >= len(rows)), len(rows))
        self.counters.num_rows += 0 if step.chunks else len(rows)
        self.counters.padded_rows += 0 if step.chunks else size - len(rows)
        may_repeat = beside is None and step.later_gpu_blocks is None and not step.write_through
        if may_repeat and self.last is not None and self.last.is_repeated_by(step):
            return self.last
        self.last, planner = None, self.attention.planner  # forget first: from here on the tables may hold anything
        self.rows.update(self._compute, step.changed_rows)
        self._set_batch(rows, step.state_slots, step.num_lines, size)
        pieces = self.resources.pieces
        host_blocks = step.host_blocks[:, first:]
        lists = planner.splits(size, step.gpu_blocks[:, first:], host_blocks, step.ends)
        chunks = planner.chunks(lists, beside)
        self.attention.upload(lists, chunks if beside is None else [a + b for a, b in zip(chunks, beside, strict=True)])
        stream_plan = pieces.plan(chunks)
        # If no sequence comes or goes, the next step streams the same blocks, except those that have come meanwhile.
        ahead, later = stream_plan, step.later_gpu_blocks
        if later is not None:
            ahead = pieces.plan(planner.chunks(planner.splits(size, later, host_blocks, step.ends)))
        elif beside is not None:
            ahead = pieces.plan(planner.chunks(lists))
        result = DecodeStep(
            program=self,
            size=size,
            chunks=chunks,
            stream_plan=stream_plan,
            ahead=ahead,
            write_through=() if step.chunks else step.write_through,
            promoted=step.promoted,
            readers=[(of_group.on_host[:, 0], of_group.on_host[:, 2]) for of_group in lists],
            rows=rows,
            valid_up_to=planner.valid_up_to(size, step.ends),
        )
        self.last = result if may_repeat else None
        return result

    def enqueue(self, key: Hashable, work: Callable[[], None], number: int = 0) -> bool:
        """Enqueue what `works` has under this key, or `work` if it is not captured. Return whether it is."""
        is_graph = self.resources.graphs.run(key, work, number)
        self.counters.graph_replays += is_graph
        return is_graph

    def promote(self, place: int, chunk: Chunk, ring_slot: int, promoted: dict[int, int]) -> None:
        """Copy promoted blocks, which stay on the GPU from now on, from the ring slot into the GPU pool."""
        kv, slot = self.resources.gpu_kv[place], self.resources.ring.slots[ring_slot]
        pairs = [(promoted[block], position) for position, block in enumerate(chunk.blocks) if block in promoted]
        for gpu_block, position, count in runs(pairs):
            self._compute.copy(kv[gpu_block : gpu_block + count], slot[position : position + count])


def _key_of_sections(streams_kv: bool, size: int) -> Hashable:
    return "sections" if streams_kv else "step", size


@dataclass(frozen=True)
class _DecodeHooks:
    """What a decode step does around pieces; see `StepHooks`.

    whole_rows: whether attention takes whole rows of the GPU pool, in place of splits.
    """

    program: DecodeProgram
    whole_rows: bool

    def begin(self, tensors: StepTensors) -> None:
        self.program.prepare(len(tensors), self.whole_rows)

    def attend(self, layer: int, tensors: StepTensors) -> None:
        self.program.attention.begin(layer, *self._rows(layer, tensors), self.whole_rows)

    def end_attention(self, layer: int, tensors: StepTensors) -> None:
        self.program.attention.end(layer, self._rows(layer, tensors)[1], self.whole_rows)

    def _rows(self, layer: int, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors.attention_rows(self.program.resources.model.spec.attention_of[layer], len(tensors))

    def end(self, tensors: StepTensors) -> None:
        """The head reads it where it is."""

    def head(self, number: int, tensors: StepTensors) -> None:
        logits = self.program.logits[: len(tensors)]
        self.program.resources.model.logits.of_slice(number, tensors.x, logits)


@dataclass
class DecodeStep(OffloadStep):
    """One decode step as the offload engine runs it (see `offload.OffloadStep`).

    Attributes:
        chunks: for each group the KV chunks of each of its layers.
        promoted: host block -> GPU block that takes over its content from the ring.
        readers: for each group two parallel arrays, the number of a sequence and a host block that it reads.
        rows, valid_up_to: [d] the rows, and how long each may get before it reads other splits of the same blocks.
        shares: what `stream_shares` returns for the step, once it was asked for.
    """

    program: DecodeProgram
    size: int
    chunks: list[list[Chunk]]
    stream_plan: StreamPlan
    ahead: StreamPlan
    write_through: Sequence[Sequence[tuple[int, int]]]
    promoted: dict[int, int]
    readers: list[tuple[np.ndarray, np.ndarray]]
    rows: np.ndarray
    valid_up_to: np.ndarray
    shares: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.streams_kv = any(self.chunks)
        self.section_ends = self.program.section_ends[self.streams_kv]
        self._key = _key_of_sections(self.streams_kv, self.size)

    def is_repeated_by(self, step: StepPlan) -> bool:
        """Whether the next step reads just what this one reads.

        A row whose GPU blocks have come or gone, at a switch of the mode too, is among `changed_rows`.
        """
        if len(step.changed_rows) or not np.array_equal(step.rows, self.rows):
            return False
        return bool(np.all(step.ends <= self.valid_up_to))

    def compute(self, section: int) -> None:
        program = self.program
        is_graph = program.enqueue(
            self._key, partial(program.run_section, self.streams_kv, section, self.size), section
        )
        program.counters.eager_steps += section == 0 and not is_graph

    def sample(self) -> None:
        """Enqueue the sampling behind the layers."""
        self.program.resources.graphs.run(("sample", self.size), partial(self.program.sample, self.size))

    def use(self, cut: int, chunk: Chunk, ring_slot: int) -> None:
        program, resources = self.program, self.program.resources
        attention, written = program.attention, resources.pieces.cuts[cut].writes
        layer = resources.pieces.attention_at[cut]
        if attention.load_record(layer, chunk, ring_slot):
            slot = attention.slot_kinds[layer], ring_slot
            program.enqueue(("slot", *slot), partial(attention.attend_slot, *slot))
        if self.promoted and written is not None:  # where another layer reads the same, it was done
            program.promote(written.place, chunk, ring_slot, self.promoted)
