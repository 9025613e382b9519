"""Decode: one token for each row of a padded batch, as pieces that run eagerly or from captured graphs.

Piece l is `after_attention` of layer l - 1, `before_attention` of layer l and layer l's attention over the GPU pool.
Between pieces l and l + 1, attention over ring slots may add more splits of layer l; piece l + 1 merges all splits.
Resident mode captures all pieces, one after the other, as one graph. So both modes run the same kernels in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import torch

from nanoinfer.attention.base import AttentionBackend, DecodeWork, Partials
from nanoinfer.execution.decode_lists import DecodeLists
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.splits import NO_SPLITS
from nanoinfer.execution.tables import ChunkRecords, DeviceTable, RowState, SplitTables
from nanoinfer.kernels.attention.limits import MAX_TILES_APART
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.layers.qkv import KVSlots
from nanoinfer.models.base import DecoderModel
from nanoinfer.step.plan import StepPlan
from offload import Chunk, Ring, Runtime, Stream, StreamPlan
from offload.layout import runs


@dataclass
class DecodeCounters:
    """Running totals of decode steps."""

    graph_replays: int = 0
    eager_steps: int = 0
    padded_rows: int = 0
    num_rows: int = 0


class DecodeProgram:
    """Buffers, tables, pieces and graphs of decode.

    Args:
        max_batch: largest padded batch.
        batch_sizes: padded batch sizes, ascending; a larger batch runs eagerly and unpadded.
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        max_blocks: blocks that all rows together may attend to; a block that several rows share counts once per row.
    """

    def __init__(
        self,
        runtime: Runtime,
        compute: Stream,
        model: DecoderModel,
        backend: AttentionBackend,
        gpu_kv: torch.Tensor,
        block_size: int,
        rows: RowState,
        ring: Ring,
        sampling: SamplingState,
        *,
        max_batch: int,
        batch_sizes: list[int],
        max_blocks: int,
    ) -> None:
        spec, device = model.spec, runtime.device
        self.batch_sizes = batch_sizes
        self._lists = DecodeLists(spec.windows, backend, block_size, ring.blocks_per_slot)
        self._windows, self._kind = self._lists.windows, self._lists.kind  # kind: layer -> index into windows
        self.counters = DecodeCounters()
        # At most MAX_TILES_APART tiles have a partial of their own; every other block has one partial.
        self.max_splits = most = max_blocks + MAX_TILES_APART
        self.rows = rows
        self.logits = torch.zeros(max_batch, spec.vocab_size, dtype=spec.dtype, device=device)
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._runtime, self._compute, self._sampling = runtime, compute, sampling
        self._model, self._backend, self._ring = model, backend, ring
        self._gpu_kv, self._block_size = gpu_kv, block_size
        heads = (max_batch, spec.attention.num_q_heads, spec.attention.head_dim)
        self._x = torch.zeros(max_batch, spec.hidden_size, dtype=spec.dtype, device=device)
        self._q = torch.zeros(heads, dtype=spec.dtype, device=device)
        self._attention = torch.zeros(heads, dtype=spec.dtype, device=device)
        self._next = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._lengths = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_batch, rows.block_table.shape[1], dtype=torch.int32, device=device)
        self._partials: Partials = backend.partials(most)
        # The host's tables, one set per window.
        self._batch_rows = DeviceTable(runtime, max_batch)
        self._splits = [SplitTables(runtime, max_batch, most) for _ in self._windows]
        self._records = [ChunkRecords(runtime, most) for _ in self._windows]
        self._slot_records = torch.zeros(ring.num_ring_slots, 4 + 4 * most, dtype=torch.int32, device=device)
        self._no_stream = StreamPlan(((),) * len(self._kind))
        self._last_splits: bytes | None = None  # key of the lists in the tables, if they are resident mode's
        self.graphs = Graphs(runtime, compute)

    # Pieces

    @property
    def num_pieces(self) -> int:
        return len(self._kind) + 1

    def piece(self, index: int, size: int) -> None:
        """Run piece `index` for a padded batch of `size` rows on the current stream.

        Each piece may be a graph of its own, so what it leaves for the next piece lies at fixed addresses.
        """
        x = self._layer(index, size, self._x[:size])
        if index == 0:
            self._x[:size].copy_(x)

    def _whole_step(self, size: int) -> None:
        x = self._x[:size]
        for index in range(self.num_pieces):
            x = self._layer(index, size, x, self.whole_rows)

    @property
    def whole_rows(self) -> bool:
        """Whether decode attends to whole rows of the GPU pool, because the backend has no fixed splits."""
        return not self._backend.exact_splits

    def _layer(self, index: int, size: int, x: torch.Tensor, whole_rows: bool = False) -> torch.Tensor:
        """Run piece `index`: add to x, [size, hidden_size], in place and return it. Piece 0 returns a new tensor."""
        model, attention = self._model, self._attention[:size]
        if index == 0:
            self._prepare(size, whole_rows)
            x, normed = model.embed(self._next[:size])
        else:
            self.merge(index - 1, attention, whole_rows)
            normed = model.after_attention(index - 1, x, attention)
        if index == len(self._kind):
            self._finish(size, normed)
            return x
        target = KVSlots(self._gpu_kv[index], self._slots[:size], self._q[:size])
        q = model.before_attention(index, normed, self._positions[:size], target)
        self.attend_gpu(index, q, attention, whole_rows)
        return x

    def attend_gpu(self, layer: int, q: torch.Tensor, out: torch.Tensor, whole_rows: bool) -> None:
        """Attend to what lies in the GPU pool.

        Args:
            q, out: [rows, num_q_heads, head_dim], for the first rows of the batch. With `whole_rows` this method writes
                `out`, otherwise `merge` does.
        """
        backend, count = self._backend, len(q)
        kv, window, lengths = self._gpu_kv[layer], self._model.spec.windows[layer], self._lengths[:count]
        if whole_rows:
            backend.decode_rows(q, kv, self._block_table[:count], lengths, out, window)
        else:
            work = self._work(self._splits[self._kind[layer]].items, self._kind[layer])
            backend.decode_partial(q, kv, work, lengths, self._partials, window)

    def merge(self, layer: int, out: torch.Tensor, whole_rows: bool) -> None:
        """Merge the partials of the GPU pool and of ring slots into `out`; arguments as in `attend_gpu`."""
        if not whole_rows:
            splits = self._splits[self._kind[layer]]
            self._backend.merge(
                self._partials,
                splits.ranges[: len(out) + 1],
                splits.partials_per_block,
                out,
                is_cut=self._lists.may_cut(len(out)),
            )

    def attend_slot(self, window_index: int, ring_slot: int) -> None:
        """Attend to what the ring slot holds. The same for all layers: everything that varies lies in device tables."""
        self._backend.decode_partial(
            self._q,
            self._ring.slots[ring_slot],
            self._work(self._slot_records[ring_slot], window_index),
            self._lengths,
            self._partials,
            self._windows[window_index],
        )

    def _work(self, table: torch.Tensor, window_index: int) -> DecodeWork:
        """Return a flat `work_table` as `DecodeWork`."""
        splits = self._splits[window_index]
        return DecodeWork(
            items=table[4:].view(-1, 4),
            num_items=table[:1],
            partials_per_block=splits.partials_per_block,
        )

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
        self._q[: len(q)].copy_(q)

    def _prepare(self, size: int, whole_rows: bool) -> None:
        """Fill in the tokens, lengths, positions and slots of the batch."""
        rows, state, block_size = self._batch_rows.tensor[:size], self.rows, self._block_size
        if whole_rows:
            self._block_table[:size].copy_(state.block_table.index_select(0, rows))
        inputs = self._next[:size], self._lengths[:size], self._positions[:size], self._slots[:size]
        state.operations.step_inputs(rows, state.tensors, inputs, block_size)

    def _finish(self, size: int, normed: torch.Tensor) -> None:
        logits = self._model.logits(normed, self.logits[:size])
        self._sampling.sample(logits, self._batch_rows.tensor[:size], self.tokens[:size])

    # Graphs

    def run_each_kind(self) -> None:
        """Run pieces that together use every kernel of a step, for each kind of batch, on padding rows."""
        self._reset_tables()
        layers = {self._kind.index(kind) for kind in self._kind}
        pieces = sorted({0, 1, len(self._kind)} | layers | {layer + 1 for layer in layers})
        beyond = [size for size in self.batch_sizes if size > MAX_ROWS]
        for size in [size for size in self.batch_sizes if size <= MAX_ROWS] + beyond[:1] + beyond[-1:]:
            x = self._x[:size]
            for index in pieces:
                x = self._layer(index, size, x, self.whole_rows)

    def is_captured(self, may_offload: bool) -> bool:
        """Whether `capture_offload` (with `may_offload`) or `capture_resident` has nothing left to capture."""
        wanted = [("step", size) for size in self.batch_sizes]
        if may_offload:
            wanted += [("pieces", size) for size in self.batch_sizes] + [("slot", *slot) for slot in self._slots_read]
        return all(key in self.graphs for key in wanted)

    @property
    def _slots_read(self) -> list[tuple[int, int]]:
        """All pairs (index of a window, ring slot) that `attend_slot` may be called with."""
        return list(product(range(len(self._windows)), range(self._ring.num_ring_slots)))

    def capture_resident(self, progress: Callable[[str], None]) -> None:
        """Captures the whole step for each batch size, the largest first, so that the shared pool grows only once."""
        self._reset_tables()
        for size in reversed(self.batch_sizes):
            self.graphs.capture(("step", size), partial(self._whole_step, size))
            progress(f"decode graph, batch {size}")

    def capture_offload(self, progress: Callable[[str], None]) -> None:
        """Captures each piece for each batch size, the attention over each ring slot, and whole steps.

        A step in which nothing streams runs as in resident mode.
        """
        self.capture_resident(progress)
        self._reset_tables()
        for size in reversed(self.batch_sizes):
            self.graphs.capture(
                ("pieces", size), *(partial(self.piece, index, size) for index in range(self.num_pieces))
            )
            progress(f"layer graphs, batch {size}")
        for slot in self._slots_read:
            self.graphs.capture(("slot", *slot), partial(self.attend_slot, *slot))
        progress("ring slot graphs")

    def _reset_tables(self) -> None:
        """Fill the tables with padding rows only, for the warm-up run before a capture to compute."""
        count = len(self._q)
        self._last_splits = None
        self._batch_rows.set(self._compute, np.full(count, self.rows.padding_row, dtype=np.int32))
        for splits in self._splits:
            splits.set(self._compute, NO_SPLITS)

    def forget_tables(self) -> None:
        """Have all tables uploaded again: after an exception, those on the device may hold anything."""
        self._last_splits = None
        for table in [self._batch_rows, *self._splits, *self._records]:
            table.forget()

    # Steps

    def padded_size(self, count: int) -> int:
        """The smallest captured batch size that holds `count` rows, or `count` itself beyond the largest."""
        return next((size for size in self.batch_sizes if size >= count), count)

    def begin(self, step: StepPlan, beside: StreamPlan | None = None) -> DecodeStep:
        """Upload what changed and plan what the rows that decode attend to.

        Args:
            beside: what the prefill step of the same mixed step streams; its blocks are attended to from its chunks.

        In resident mode the lists of splits change only when a row comes, goes or begins a split (a block, or a part of
        one in short rows). Until then they are not made again.
        """
        assert np.all(step.ends - step.begins == 1), "a decoding row computes one token"
        self.rows.update(self._compute, step.changed_rows)
        rows, lengths, first = step.rows, step.ends, len(step.chunks)
        size = self.padded_size(len(rows))
        self.counters.num_rows += 0 if step.chunks else len(rows)
        self.counters.padded_rows += 0 if step.chunks else size - len(rows)
        padding = np.full(size - len(rows), self.rows.padding_row, dtype=np.int32)
        self._batch_rows.set(self._compute, np.concatenate([rows, padding]))
        resident, write_through = None, [] if step.chunks else step.write_through
        if not step.may_stream:
            resident = self._lists.key(size, rows, lengths)
        if resident is not None and resident == self._last_splits and not len(step.changed_rows):
            return DecodeStep(self, size, self._no_stream, self._no_stream, write_through)
        self._last_splits = None
        host_blocks = step.host_blocks[first:]
        lists = self._lists.splits(size, step.gpu_blocks[first:], host_blocks, lengths)
        plan = self._lists.stream_plan(lists, beside)
        for index, found in enumerate(lists):
            num_splits = found.ranges[-1]
            assert num_splits <= self.max_splits, f"{num_splits} splits in a workspace of {self.max_splits}"
            self._splits[index].set(self._compute, found)
            chunks = [chunk for part in (plan, beside) if part for chunk in part.chunks[self._kind.index(index)]]
            self._records[index].set(self._compute, found, chunks)
        self._last_splits = resident
        # If no sequence comes or goes, the next step streams the same blocks, except those that have come meanwhile.
        ahead, later = plan, step.later_gpu_blocks
        if later is not None:
            ahead = self._lists.stream_plan(self._lists.splits(size, later, host_blocks, lengths))
        elif beside is not None:
            ahead = self._lists.stream_plan(lists)
        readers = [(found.on_host[:, 0], found.on_host[:, 2]) for found in lists]
        return DecodeStep(self, size, plan, ahead, write_through, step.promoted, readers)

    def run_whole(self, step: DecodeStep) -> None:
        """Enqueue a whole step that needs no ring."""
        is_graph = self.graphs.run(("step", step.size), partial(self._whole_step, step.size))
        self.counters.graph_replays += is_graph
        self.counters.eager_steps += not is_graph

    def enqueue_piece(self, index: int, size: int) -> None:
        is_graph = self.graphs.run(("pieces", size), partial(self.piece, index, size), index)
        self.counters.graph_replays += is_graph
        self.counters.eager_steps += index == 0 and not is_graph

    def enqueue_attend(self, layer: int, chunk: Chunk, ring_slot: int) -> None:
        window = self._kind[layer]
        if self._records[window].copy(self._compute, chunk, self._slot_records[ring_slot]):
            work = partial(self.attend_slot, window, ring_slot)
            self.counters.graph_replays += self.graphs.run(("slot", window, ring_slot), work)

    def keep(self, layer: int, chunk: Chunk, ring_slot: int, promoted: dict[int, int]) -> None:
        """Copy promoted blocks, which stay on the GPU from now on, from the ring slot into the GPU pool."""
        kv, slot = self._gpu_kv[layer], self._ring.slots[ring_slot]
        pairs = [(promoted[block], place) for place, block in enumerate(chunk.blocks) if block in promoted]
        for gpu_block, place, count in runs(pairs):
            self._compute.copy(kv[gpu_block : gpu_block + count], slot[place : place + count])


@dataclass
class DecodeStep:
    """One decode step as the offload engine runs it (see `offload.OffloadStep`).

    Attributes:
        promoted: host block -> GPU block that takes over its content from the ring.
        readers: for each window two parallel arrays, the number of a sequence and a host block that it reads.
    """

    program: DecodeProgram
    size: int
    plan: StreamPlan
    ahead: StreamPlan
    write_through: Sequence[tuple[int, int]]
    promoted: dict[int, int] = field(default_factory=dict)
    readers: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def compute_all(self) -> bool:
        self.program.run_whole(self)
        return True

    def compute(self, layer: int) -> None:
        self.program.enqueue_piece(layer, self.size)

    def attend(self, layer: int, chunk: Chunk, ring_slot: int) -> None:
        self.program.enqueue_attend(layer, chunk, ring_slot)
        if self.promoted:
            self.program.keep(layer, chunk, ring_slot, self.promoted)
