"""Decode: one token for each row of a padded batch, as pieces that run eagerly or from captured graphs.

Piece i is segment i (`execution/segments.py`) and attention i over the GPU pool. Between pieces i and i + 1, attention
over ring slots may add more splits; piece i + 1 merges all splits. The last piece ends with the logits. Resident mode
captures all pieces, one after the other, as one graph. Sampling is another one, in both modes. So both modes run the
same kernels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch

from nanoinfer.execution.decode_attention import DecodeAttention
from nanoinfer.execution.graphs import GraphWork
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.segments import Around
from nanoinfer.execution.splits import NO_SPLITS
from nanoinfer.execution.step_tensors import FixedBuffers, StepTensors
from nanoinfer.execution.tables import DeviceTable, RowState
from nanoinfer.kernels.linear.counts import MAX_ROWS
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
        indices: of all pieces.
        last: the step whose lists the tables hold, if another may repeat it.
    """

    def __init__(self, resources: Resources) -> None:
        spec, device, self._block_size = resources.model.spec, resources.runtime.device, resources.layout.block_size
        self.resources, self._compute = resources, resources.compute
        self.batch_sizes = resources.config.graph_batch_sizes(resources.plan.max_num_seqs)
        max_batch = max(self.batch_sizes[-1], resources.plan.max_num_seqs)
        self.rows = rows = RowState(resources.runtime, resources.plan.max_num_seqs, resources.max_blocks_per_seq)
        self.sampling = SamplingState(resources.runtime, rows, spec.vocab_size, max_batch)
        self.indices = range(len(resources.segments))
        self.counters = DecodeCounters()
        self.logits = torch.zeros(max_batch, spec.vocab_size, dtype=spec.dtype, device=device)
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._buffers = FixedBuffers(spec, max_batch, device)
        self._next = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = self._buffers.positions
        self._slots = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._lengths = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_batch, rows.block_table.shape[1], dtype=torch.int32, device=device)
        self.batch_rows = DeviceTable(resources.runtime, max_batch)
        self.attention = DecodeAttention(resources, self._buffers.q, self._lengths, self._block_table)
        self.last: DecodeStep | None = None

    # Pieces

    def run_piece(self, index: int, size: int) -> None:
        """Run piece `index` for a padded batch of `size` rows on the current stream.

        Each piece may be a graph of its own, so what it leaves for the next piece lies at fixed addresses.
        """
        tensors = self._tensors(size)
        self.resources.segments.piece(index, tensors, self._around(whole_rows=False))
        if index == 0:
            self._buffers.x[:size].copy_(tensors.x)

    def run_pieces(self, indices: Iterable[int], size: int) -> None:
        """Run pieces of one padded batch, one after the other."""
        tensors, around = self._tensors(size), self._around(self.attention.whole_rows)
        for index in indices:
            self.resources.segments.piece(index, tensors, around)

    def _around(self, whole_rows: bool) -> Around:
        """Return what a step does around segments.

        whole_rows: whether attention takes whole rows of the GPU pool, in place of splits.
        """

        def before(index: int, tensors: StepTensors) -> None:
            if index == 0:
                self._prepare(len(tensors), whole_rows)
            else:
                self.attention.end(index - 1, tensors.attention, whole_rows)

        def after(index: int, tensors: StepTensors) -> None:
            if index == len(self.resources.segments) - 1:
                self.resources.model.logits(tensors.x, self.logits[: len(tensors)])
            else:
                self.attention.begin(index, tensors.q, tensors.attention, whole_rows)

        return SimpleNamespace(before=before, after=after)

    def sample(self, size: int) -> None:
        """Sample the next token of each row of a padded batch of `size` rows, whose logits the last piece has left."""
        self.sampling.sample(self.logits[:size], self.batch_rows.tensor[:size], self.tokens[:size])

    def _tensors(self, size: int) -> StepTensors:
        rows, fixed = self.batch_rows.tensor[:size], self._buffers.first(size)
        return StepTensors(self._next[:size], self._positions[:size], self._slots[:size], rows, **fixed)

    def copy_inputs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, whole_rows: bool
    ) -> None:
        """Write the batch's next token ids, positions and slots, [rows] int32 each, for a `MixedStep` to compute."""
        count = len(token_ids)
        self._prepare(count, whole_rows)
        token_ids.copy_(self._next[:count])
        positions.copy_(self._positions[:count])
        slots.copy_(self._slots[:count])

    def copy_queries(self, q: torch.Tensor) -> None:
        """Copy the batch's queries, [rows, num_q_heads, head_dim], to where attention over ring slots reads them."""
        self._buffers.q[: len(q)].copy_(q)

    def _prepare(self, size: int, whole_rows: bool) -> None:
        """Fill in the tokens, lengths, positions and slots of the batch."""
        rows, state, block_size = self.batch_rows.tensor[:size], self.rows, self._block_size
        if whole_rows:
            self._block_table[:size].copy_(state.block_table.index_select(0, rows))
        inputs = self._next[:size], self._lengths[:size], self._positions[:size], self._slots[:size]
        state.operations.step_inputs(rows, state.tensors, inputs, block_size)

    # Graphs

    def run_each_kind(self) -> None:
        """Run pieces that together use every kernel of a step, for each kind of batch, on padding rows."""
        self._reset_tables()
        kind = self.resources.kind
        layers = {kind.index(one) for one in kind}
        pieces = sorted({0, 1, len(kind)} | layers | {layer + 1 for layer in layers})
        beyond = [size for size in self.batch_sizes if size > MAX_ROWS]
        for size in [size for size in self.batch_sizes if size <= MAX_ROWS] + beyond[:1] + beyond[-1:]:
            self.run_pieces(pieces, size)
            self.sample(size)

    def works(self, may_offload: bool) -> Iterator[GraphWork]:
        """Yield the work to capture, the largest batch first, so that the memory that all graphs share grows only once.

        There are all layers and the sampling of each batch size, which serve wherever nothing streams; with
        `may_offload` also each piece, and the attention over each ring slot.
        """
        sizes, indices, prepare = self.batch_sizes[::-1], self.indices, self._reset_tables
        for size in sizes:
            whole = partial(self.run_pieces, indices, size)
            yield GraphWork(("step", size), f"decode graph, batch {size}", prepare, [whole])
            yield GraphWork(("sample", size), f"sampling graph, batch {size}", prepare, [partial(self.sample, size)])
        for size in sizes if may_offload else ():
            pieces = [partial(self.run_piece, index, size) for index in indices]
            yield GraphWork(("pieces", size), f"layer graphs, batch {size}", prepare, pieces)
        slots = product(range(len(self.resources.windows)), range(self.resources.ring.num_ring_slots))
        for slot in slots if may_offload else ():
            yield GraphWork(("slot", *slot), "ring slot graphs", prepare, [partial(self.attention.attend_slot, *slot)])

    def _reset_tables(self) -> None:
        """Fill the tables with padding rows only, for the warm-up run before a capture to compute."""
        self.last = None
        self.batch_rows.set(self._compute, np.full(len(self.tokens), self.rows.padding_row, dtype=np.int32))
        self.attention.upload([NO_SPLITS] * len(self.resources.windows), [])

    def forget_tables(self) -> None:
        """Have all tables uploaded again: after an exception, those on the device may hold anything."""
        self.last = None
        self.batch_rows.forget()
        self.attention.forget_tables()

    # Steps

    def begin(self, step: StepPlan, beside: StreamPlan | None = None) -> DecodeStep:
        """Upload what changed and plan what the rows that decode attend to.

        Args:
            beside: what the prefill step of the same mixed step streams; its blocks are attended to from its chunks.

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
        self.last, make = None, self.attention.lists  # forget first: from here on the tables may hold anything
        self.rows.update(self._compute, step.changed_rows)
        padding = np.full(size - len(rows), self.rows.padding_row, dtype=np.int32)
        self.batch_rows.set(self._compute, np.concatenate([rows, padding]))
        host_blocks = step.host_blocks[first:]
        lists = make.splits(size, step.gpu_blocks[first:], host_blocks, step.ends)
        plan = make.stream_plan(lists, beside)
        self.attention.upload(lists, [plan] if beside is None else [plan, beside])
        # If no sequence comes or goes, the next step streams the same blocks, except those that have come meanwhile.
        ahead, later = plan, step.later_gpu_blocks
        if later is not None:
            ahead = make.stream_plan(make.splits(size, later, host_blocks, step.ends))
        elif beside is not None:
            ahead = make.stream_plan(lists)
        result = DecodeStep(
            program=self,
            size=size,
            plan=plan,
            ahead=ahead,
            write_through=[] if step.chunks else step.write_through,
            promoted=step.promoted,
            readers=[(found.on_host[:, 0], found.on_host[:, 2]) for found in lists],
            rows=rows,
            until=make.until(size, step.ends),
        )
        self.last = result if may_repeat else None
        return result

    def enqueue(self, key: tuple, work: Callable[[], None], number: int = 0) -> bool:
        """Enqueue what `works` has under this key, or `work` if it is not captured. Return whether it is."""
        is_graph = self.resources.graphs.run(key, work, number)
        self.counters.graph_replays += is_graph
        return is_graph

    def promote(self, layer: int, chunk: Chunk, ring_slot: int, promoted: dict[int, int]) -> None:
        """Copy promoted blocks, which stay on the GPU from now on, from the ring slot into the GPU pool."""
        kv, slot = self.resources.gpu_kv[layer], self.resources.ring.slots[ring_slot]
        pairs = [(promoted[block], place) for place, block in enumerate(chunk.blocks) if block in promoted]
        for gpu_block, place, count in runs(pairs):
            self._compute.copy(kv[gpu_block : gpu_block + count], slot[place : place + count])


@dataclass
class DecodeStep(OffloadStep):
    """One decode step as the offload engine runs it (see `offload.OffloadStep`).

    Attributes:
        promoted: host block -> GPU block that takes over its content from the ring.
        readers: for each window two parallel arrays, the number of a sequence and a host block that it reads.
        rows, until: [d] the rows, and how long each may get before it reads other splits of the same blocks.
        shares: what `stream_shares` returns for the step, once it was asked for.
    """

    program: DecodeProgram
    size: int
    plan: StreamPlan
    ahead: StreamPlan
    write_through: Sequence[tuple[int, int]]
    promoted: dict[int, int]
    readers: list[tuple[np.ndarray, np.ndarray]]
    rows: np.ndarray
    until: np.ndarray
    shares: np.ndarray | None = None
    is_one_graph = True

    def is_repeated_by(self, step: StepPlan) -> bool:
        """Whether the next step reads just what this one reads.

        A row whose GPU blocks have come or gone, at a switch of the mode too, is among `changed_rows`.
        """
        if len(step.changed_rows) or not np.array_equal(step.rows, self.rows):
            return False
        return bool(np.all(step.ends <= self.until))

    def compute_all(self) -> None:
        program, size = self.program, self.size
        is_graph = program.enqueue(("step", size), partial(program.run_pieces, program.indices, size))
        program.counters.eager_steps += not is_graph

    def compute(self, index: int) -> None:
        program, size = self.program, self.size
        is_graph = program.enqueue(("pieces", size), partial(program.run_piece, index, size), index)
        program.counters.eager_steps += index == 0 and not is_graph

    def sample(self) -> None:
        """Enqueue the sampling behind the layers."""
        self.program.resources.graphs.run(("sample", self.size), partial(self.program.sample, self.size))

    def attend(self, layer: int, chunk: Chunk, ring_slot: int) -> None:
        attention = self.program.attention
        if attention.load_record(layer, chunk, ring_slot):
            slot = self.program.resources.kind[layer], ring_slot
            self.program.enqueue(("slot", *slot), partial(attention.attend_slot, *slot))
        if self.promoted:
            self.program.promote(layer, chunk, ring_slot, self.promoted)
