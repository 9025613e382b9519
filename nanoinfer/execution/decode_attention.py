"""Attention of decoding rows: what they attend to, partials over the GPU pool and over ring slots, and their merge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from nanoinfer.attention.base import DecodeWork, Partials
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.splits import SplitLists, SplitPlanner
from nanoinfer.execution.tables import ChunkRecords, SplitTables
from nanoinfer.kernels.attention.spec import MAX_TILES_APART
from offload import Chunk


class DecodeAttention:
    """Tables and workspace of the decode attention, and its launches. Layers without attention do not count.

    Args:
        queries: [max_batch * most of a token], where attention over ring slots reads q.
        lengths: [max_batch] int32, the rows' tokens.
        block_tables: [groups, max_batch, table width] int32, the rows' GPU blocks, for backends without fixed splits.

    Attributes:
        planner: makes the lists of what is attended to.
        whole_rows: whether decode attends to whole rows of the GPU pool, because the backend has no fixed splits.
    """

    def __init__(
        self, resources: Resources, queries: torch.Tensor, lengths: torch.Tensor, block_tables: torch.Tensor
    ) -> None:
        runtime, ring, self._compute = resources.runtime, resources.ring, resources.compute
        self._backends, self._groups = resources.backend_of_group, resources.groups
        self._resources = resources
        self.planner = SplitPlanner(resources)
        self._sinks, self._own, self._reads = resources.pieces.sinks, resources.pieces.own, resources.pieces.reads
        self._queries, self._lengths, self._block_tables = queries, lengths, block_tables
        self.whole_rows = not resources.backends[0].exact_splits
        # At most MAX_TILES_APART tiles have a partial of their own; every other block has one partial, and a block that
        # several rows share has one for each.
        self._max_splits = most = resources.memory_plan.max_splits + MAX_TILES_APART
        partials = resources.backends.partials(most)
        self._partials: list[Partials] = [partials[group.shape] for group in resources.groups]
        # The host's tables, one set per group.
        self.splits = [SplitTables(runtime, len(lengths), most) for _ in resources.groups]
        self.records = [ChunkRecords(runtime, most) for _ in resources.groups]
        self._slot_records = torch.zeros(ring.num_ring_slots, 4 + 4 * most, dtype=torch.int32, device=runtime.device)

    def upload(self, by_group: list[SplitLists], chunks: Sequence[list[Chunk]]) -> None:
        """Upload for each group the lists of splits, and the records of the KV chunks that pass in the step."""
        for index, lists in enumerate(by_group):
            num_splits = lists.ranges[-1]
            assert num_splits <= self._max_splits, f"{num_splits} splits in a workspace of {self._max_splits}"
            self.splits[index].set(self._compute, lists)
            self.records[index].set(self._compute, lists, chunks[index])

    def forget_tables(self) -> None:
        """Have all tables uploaded again: after an exception, those on the device may hold anything."""
        for tables in [*self.splits, *self.records]:
            tables.table.forget()

    def begin(self, layer: int, q: torch.Tensor, out: torch.Tensor, whole_rows: bool) -> None:
        """Attend to what lies in the GPU pool.

        Args:
            q, out: [rows, num_q_heads, head_dim], for the first rows of the batch. With `whole_rows` this method writes
                `out`, otherwise `end` does.
        """
        (group, place), lengths = self._reads[layer], self._lengths[: len(q)]
        kv, window, backend = self._resources.kv_at(group, place), self._groups[group].window, self._backends[group]
        if whole_rows:
            backend.decode_rows(q, kv, self._block_tables[group, : len(q)], lengths, out, window)
        else:
            work = self._work(self.splits[group].items, group, after_copy=False)
            backend.decode_partial(q, kv, work, lengths, self._partials[group], window, self._own[layer])

    def end(self, layer: int, out: torch.Tensor, whole_rows: bool) -> None:
        """Merge the partials of the GPU pool and of ring slots into `out`; arguments as in `begin`."""
        if not whole_rows:
            group = self._reads[layer].group
            splits = self.splits[group]
            self._backends[group].merge(
                self._partials[group],
                splits.ranges[: len(out) + 1],
                splits.partials_per_block,
                out,
                is_cut=self.planner.may_cut(len(out), group),
                sinks=self._sinks[layer],
            )

    def load_record(self, layer: int, chunk: Chunk, ring_slot: int) -> bool:
        """Enqueue the upload of what `attend_slot` attends to. Return False if no row attends to the chunk."""
        records = self.records[self._reads[layer].group]
        return records.copy(self._compute, chunk, self._slot_records[ring_slot])

    @cached_property
    def slot_kinds(self) -> list[int]:
        """For each layer with attention the first one of its group, and with the same tensors for its KV format.

        Attention over a ring slot is launched for these alone: what else varies lies in device tables.
        """
        pairs = zip(self._reads, self._own, strict=True)
        kinds = [(read.group, [id(one) for one in own]) for read, own in pairs]
        return [kinds.index(kind) for kind in kinds]

    def attend_slot(self, layer: int, ring_slot: int) -> None:
        """Attend to what the ring slot holds. layer: one of `slot_kinds`."""
        group = self._reads[layer].group
        backend = self._backends[group]
        backend.decode_partial(
            backend.spec.heads_of(self._queries, len(self._lengths)),
            self._resources.slot_of(group, ring_slot),
            self._work(self._slot_records[ring_slot], group, after_copy=True),
            self._lengths,
            self._partials[group],
            self._groups[group].window,
            self._own[layer],
        )

    def _work(self, table: torch.Tensor, group: int, after_copy: bool) -> DecodeWork:
        """Return a flat `work_table` as `DecodeWork`."""
        return DecodeWork(
            items=table[4:].view(-1, 4),
            num_items=table[:1],
            partials_per_block=self.splits[group].partials_per_block,
            after_copy=after_copy,
        )
