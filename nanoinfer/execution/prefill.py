"""Prefill: chunks of prompts through all layers, with the history from the GPU pool or through the ring.

The keys of a sequence are walked in ascending order. Keys in the host pool come first: they pass through the ring, and
the running softmax is stored between two ring chunks. The GPU pool holds the newest tokens; its range comes last and
writes the output. If everything lies in the GPU pool, there is only that range. Both ways give the same bits. A prefix
that several sequences of a step share passes through the ring once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from nanoinfer.attention.base import KeyRange, PrefillState
from nanoinfer.execution.prefill_pieces import PrefillPieces, pack_inputs
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.state_tables import StateTables
from nanoinfer.execution.tables import DeviceTable, Packer
from nanoinfer.kernels.linear.counts import padded_rows
from nanoinfer.models.step_tensors import StepTensors
from nanoinfer.step.plan import NO_BLOCK, PromptChunk, StepPlan
from offload import Chunk, KVGroup, OffloadStep, StreamPlan, pack_together
from offload.layout import runs


class PrefillProgram:
    """Runs prefill steps: the pieces of small steps from graphs, attention and larger steps eagerly."""

    def __init__(self, resources: Resources) -> None:
        runtime, states, plan = resources.runtime, resources.states, resources.memory_plan
        self.resources, num_groups = resources, len(resources.groups)
        # Token id, position and slots of a padding token: the KV store skips negative slots.
        self._padding = (0, 0, -1)
        max_tokens, max_seqs = plan.max_num_batched_tokens, min(plan.max_num_seqs, plan.max_num_batched_tokens)
        self._states = StateTables(states.padding_slot, max_seqs) if states.of_layer else None
        # The table holds how many tokens are live, tokens, positions, slots and runs; which of them are scored, and by
        # which token; then per sequence the offsets and ranges; then block tables and ring chunks. Every sequence of
        # the step may have a history on the host (a shared prefix, a switch), with each of its blocks in a separate
        # ring slot.
        blocks = min(plan.max_splits, max_seqs * resources.table_width)
        num_rows = padded_rows(max_tokens) if resources.device.pads_rows else max_tokens
        size = 4 + (2 + num_groups) * num_rows + 2 * max_tokens + 1
        size += self._states.most_elements(num_rows) if self._states else 0
        size += num_groups * max_seqs * resources.table_width
        size += (5 + bool(states.of_layer) + 2 * num_groups) * max_seqs
        # Each array begins at a multiple of 4.
        size += 3 * (9 + bool(states.of_layer) + 4 * num_groups)
        size += 3 * num_groups * blocks
        self._table = DeviceTable(runtime, size)
        self.pieces = PrefillPieces(resources, self._table, self._padding, self._states)
        # By numpy: on the meta device, where plans are counted, torch imports sympy for its own `arange`.
        positions = np.arange(resources.ring.blocks_per_slot, dtype=np.int32)
        self.slot_table = torch.tensor(positions[None], device=runtime.device)

    def begin(self, step: StepPlan, logits: torch.Tensor) -> PrefillStep:
        """Upload the tables of the step's chunks and plan what the chunks attend to.

        The last tokens of decoding rows follow the chunks' tokens; `MixedStep` fills them in and attends.

        logits: [sampled rows, vocab_size], which the step fills.
        """
        chunks = step.chunks
        gpu_blocks, host_blocks = step.gpu_blocks[:, : len(chunks)], step.host_blocks[:, : len(chunks)]
        lengths = np.array([chunk.end - chunk.begin for chunk in chunks])
        ends = np.cumsum(lengths)
        num_tokens, num_live = int(ends[-1]), int(ends[-1]) + len(step.rows)
        packer, inputs = pack_inputs(self._table, self._inputs(chunks, gpu_blocks, step.state_slots), num_live)
        begun = packer.add([chunk.state_slot for chunk in chunks if self._states and chunk.begin == 0])
        scored, scored_by = map(packer.add, _scored(chunks, lengths))
        ended = ends[[chunk.is_last for chunk in chunks]] - 1
        last, last_rows = packer.add([*ended, *range(num_tokens, num_live)]), packer.add(step.sampled_rows)
        gpu_ranges, passing, slot_tables, readers = self._reads(chunks, gpu_blocks, host_blocks, ends, packer)
        packer.upload(self.resources.compute)
        if len(step.rows):
            self._table.forget()  # `MixedStep` writes there, too
        tensors = self.pieces.begin(num_live, inputs)
        pieces, samples = self.resources.pieces, len(logits) > 0
        # Log-probabilities of prompts are made behind the step, with the head's slices in the landing buffers.
        takes_landing_buffers = len(scored) > 0 and self.resources.model.streamed.head is not None
        return PrefillStep(
            program=self,
            write_through=step.write_through,
            chunks=passing,
            stream_plan=pieces.plan(passing, len(tensors), samples),
            # A decode step or another prompt may follow. We do not know which KV it reads, so only weights are fetched
            # ahead, and none of those that large steps alone bring.
            ahead=None if any(passing) or takes_landing_buffers else pieces.plan(passing, samples=samples),
            section_ends=tuple(pieces.piece_indices(samples)),
            logits=logits,
            num_tokens=num_tokens,
            tensors=tensors,
            begun=begun,
            last=last,
            last_rows=last_rows,
            scored=scored,
            scored_by=scored_by,
            takes_landing_buffers=takes_landing_buffers,
            gpu_ranges=gpu_ranges,
            slot_tables=slot_tables,
            lengths=lengths,
            readers=readers,
        )

    def _reads(
        self,
        chunks: Sequence[PromptChunk],
        gpu_blocks: np.ndarray,
        host_blocks: np.ndarray,
        ends: np.ndarray,
        packer: Packer,
    ) -> tuple[list[KeyRange], tuple, tuple, tuple]:
        """Return what of each group the chunks read: on the GPU; and what passes through the ring, with its tables."""
        of_groups = partial(
            KeyRange,
            cu_seqlens_q=packer.add(np.concatenate([[0], ends])),
            query_pos=packer.add([chunk.begin for chunk in chunks]),
            kv_end=packer.add([chunk.end for chunk in chunks]),
            max_query_len=int(np.diff(ends, prepend=0).max()),
            query_rows=(0, int(ends[-1])),
            store_state=False,
        )
        gpu_ranges, histories = [], []
        for group, on_gpu, on_host in zip(self.resources.groups, gpu_blocks, host_blocks, strict=True):
            first_blocks, num_blocks, table = _on_gpu(chunks, on_gpu, group)
            *history, load_state = self._history(chunks, on_host, first_blocks, group, packer)
            histories.append(history)
            tables = dict(first_block=packer.add(first_blocks), block_table=packer.add(table))
            gpu_ranges.append(of_groups(load_state=load_state, num_blocks=num_blocks, **tables))
        return gpu_ranges, *zip(*histories, strict=True)

    def forget_tables(self) -> None:
        """Have the table uploaded again: after an exception, the one on the device may hold anything."""
        self._table.forget()

    def _inputs(
        self, chunks: Sequence[PromptChunk], gpu_blocks: np.ndarray, decoding: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield token ids, positions, slots and, if a layer keeps a state, runs of the step's tokens and padding.

        decoding: the state slots of rows that decode, whose tokens follow the chunks' and only the device knows.
        """
        positions = [np.arange(chunk.begin, chunk.end) for chunk in chunks]
        slots = [
            np.stack([_slots(blocks, at, group) for blocks, group in zip(of_row, self.resources.groups, strict=True)])
            for of_row, at in zip(gpu_blocks.swapaxes(0, 1), positions, strict=True)
        ]
        token_ids = [chunk.token_ids for chunk in chunks]
        count = self.pieces.padded_count(sum(map(len, positions)) + len(decoding))
        for columns, value in zip((token_ids, positions, slots), self._padding, strict=True):
            known = np.concatenate(columns, axis=-1)
            padding = np.full((*known.shape[:-1], count - known.shape[-1]), value)
            yield np.concatenate([known, padding], axis=-1)
        if self._states:
            yield from self._states.of_step(chunks, decoding, count, count in self.pieces.fixed)

    def _history(
        self,
        chunks: Sequence[PromptChunk],
        host_blocks: np.ndarray,
        ends: list[int],
        group: KVGroup,
        packer: Packer,
    ) -> tuple[list[Chunk], torch.Tensor, tuple[np.ndarray, np.ndarray], torch.Tensor]:
        """Pack the host blocks before logical block `ends[i]` that a query of chunk i sees, for layers of one group.

        Returns:
            The ring chunks; this group's `PrefillStep.slot_tables` and `PrefillStep.readers`; and [sequences] int32,
            whether a sequence has any (its load state for the GPU pool).
        """
        block_size = group.block_size
        firsts = [min(group.first_needed(chunk.begin), end) for chunk, end in zip(chunks, ends, strict=True)]
        lists = [blocks[:end] for blocks, end in zip(host_blocks, ends, strict=True)]
        assert all(np.all(blocks[first:] != NO_BLOCK) for blocks, first in zip(lists, firsts, strict=True)), (
            "a block lies neither on the GPU nor on the host"
        )
        tagged, rows, number = [], [], 0
        for chunk, readers in pack_together(lists, firsts, self.resources.ring.blocks_per_slot):
            # Runs of neighbours, which one launch attends to: (number of the first record, first sequence, count).
            neighbours = [
                (number + position, first, count) for position, first, count in runs(list(enumerate(readers)))
            ]
            end = (chunk.begin + len(chunk.blocks)) * block_size
            rows += [(chunk.begin, end, int(chunk.begin > firsts[reader])) for reader in readers]
            number += len(readers)
            tagged.append(replace(chunk, tag=tuple(neighbours)))
        blocks = [blocks[first:] for blocks, first in zip(lists, firsts, strict=True)]
        readers = np.repeat(np.arange(len(blocks)), [len(one) for one in blocks]), np.concatenate(blocks)
        load_state = packer.add([first < end for first, end in zip(firsts, ends, strict=True)])
        return tagged, packer.add(np.array(rows, dtype=np.int32).reshape(-1, 3).T), readers, load_state


def _scored(chunks: Sequence[PromptChunk], lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the step's tokens are scored, and by which tokens."""
    next_ids, begins = [chunk.next_token_ids for chunk in chunks], np.cumsum(lengths) - lengths
    indices = [begin + np.arange(len(ids)) for begin, ids in zip(begins, next_ids, strict=True)]
    return np.concatenate(indices), np.concatenate(next_ids)


def _slots(blocks: np.ndarray, positions: np.ndarray, group: KVGroup) -> np.ndarray:
    """Return the slots of tokens of one row. blocks: its block table."""
    return blocks[positions // group.block_size] * group.block_size + positions % group.block_size


def _on_gpu(
    chunks: Sequence[PromptChunk], gpu_blocks: np.ndarray, group: KVGroup
) -> tuple[list[int], list[int], np.ndarray]:
    """Return for each chunk its first logical block on the GPU, how many there are, and a line of them."""
    lines, firsts = [], []
    for chunk, blocks in zip(chunks, gpu_blocks, strict=True):
        needed = blocks[: -(-chunk.end // group.block_size)]
        firsts.append(_first_gpu_block(needed))
        lines.append(needed[firsts[-1] :])
    counts = [len(line) for line in lines]
    table = np.zeros((len(chunks), max(counts)), dtype=np.int32)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return firsts, counts, table


def _first_gpu_block(blocks: np.ndarray) -> int:
    """Return the place from which on all of a row's blocks lie on the GPU; what lies before is on the host, or gone."""
    missing = np.flatnonzero(blocks == NO_BLOCK)
    return int(missing[-1]) + 1 if len(missing) else 0


@dataclass
class PrefillStep(OffloadStep):
    """One prefill step as the offload engine runs it (see `offload.OffloadStep`), and what it does around pieces.

    Attributes:
        num_tokens: tokens of the chunks.
        chunks: for each group the KV chunks of each of its layers.
        tensors: what the pieces read and leave; dropped behind the last one.
        states: for each shape of attention, what passes from one of its ranges to the next; None: there is one range.
        begun: [n] the state slots of sequences that begin; none if no layer keeps a state.
        last: [n] index in the step of each token after which a token is sampled: the last tokens of chunks that end
            their prompt, then the tokens of decoding sequences.
        last_rows: [n] the rows of these tokens.
        section_ends: as in `OffloadStep`: each piece is a section, since its graph, where there is one, does not depend
            on what streams; so is each slice of the head, if a token is sampled.
        logits: [n, vocab_size], of these tokens; filled by the head.
        last_normed: [n, hidden_size], what the head reads; filled by the last piece.
        scored, scored_by: [m] each, index in the step of each token behind which one of the prompt has its
            log-probability made, and that one's id; none if nobody wants any.
        takes_landing_buffers: whether the head is brought for these behind the step, which fetches nothing ahead then.
        normed: [N, hidden_size], what the head reads of all tokens; left by the last piece where some are scored.
        gpu_ranges: for each group what the chunks attend to in the GPU pool.
        slot_tables: for each group [3, n] int32: first block, end of the keys and load state of each pair of a ring
            chunk and a sequence that reads it.
        readers: for each group two parallel arrays, the number of a chunk and a host block that it reads.
    """

    program: PrefillProgram
    write_through: Sequence[Sequence[tuple[int, int]]]
    chunks: Sequence[list[Chunk]]
    stream_plan: StreamPlan
    ahead: StreamPlan | None
    section_ends: tuple[int, ...]
    logits: torch.Tensor
    num_tokens: int
    tensors: StepTensors | None
    begun: torch.Tensor
    last: torch.Tensor
    last_rows: torch.Tensor
    scored: torch.Tensor
    scored_by: torch.Tensor
    takes_landing_buffers: bool
    gpu_ranges: list[KeyRange]
    slot_tables: Sequence[torch.Tensor]
    lengths: np.ndarray
    readers: Sequence[tuple[np.ndarray, np.ndarray]]
    shares: np.ndarray | None = None
    last_normed: torch.Tensor = field(init=False)
    normed: torch.Tensor | None = None
    states: list[PrefillState] | None = None

    def compute(self, section: int) -> None:
        resources = self.program.resources
        resources.pieces.run_with_hooks(section, self.tensors, self, resources.graphs.run)

    def use(self, cut: int, chunk: Chunk, ring_slot: int) -> None:
        resources = self.program.resources
        resources.compute.run(lambda: self._attend_slot(resources.pieces.attention_at[cut], chunk, ring_slot))

    # Around pieces

    def begin(self, tensors: StepTensors) -> None:
        self.program.resources.compute.run(self._begin)

    def attend(self, layer: int, tensors: StepTensors) -> None:
        """Keys on the host come first, so nothing is begun here."""

    def end_attention(self, layer: int, tensors: StepTensors) -> None:
        resources = self.program.resources
        group, place = resources.pieces.reads[layer]
        kv = resources.kv_at(group, place)
        resources.compute.run(lambda: self._attend(layer, self.gpu_ranges[group], kv))

    def end(self, tensors: StepTensors) -> None:
        self.program.resources.compute.run(self._end)

    def head(self, number: int, tensors: StepTensors | None) -> None:
        resources = self.program.resources
        resources.compute.run(lambda: resources.model.logits.of_slice(number, self.last_normed, self.logits))

    def _begin(self) -> None:
        resources = self.program.resources
        if any(self.chunks) or resources.backends.cut_ranges:
            self.states = resources.backends.prefill_state(self.num_tokens)
        self.tensors.reserve(resources.model.spec)
        resources.states.reset(self.begun)

    def _end(self) -> None:
        self.last_normed = self.tensors.x.index_select(0, self.last)
        self.normed = self.tensors.x if len(self.scored) else None
        self.tensors = self.states = None

    def _attend_slot(self, layer: int, chunk: Chunk, ring_slot: int) -> None:
        """Attend to a ring slot: once for each run of neighbouring sequences that read the chunk."""
        resources = self.program.resources
        group = resources.pieces.reads[layer].group
        gpu_range, table = self.gpu_ranges[group], self.slot_tables[group]
        for number, first, count in chunk.tag:
            last, records = first + count, table[:, number : number + count]
            key_range = KeyRange(
                cu_seqlens_q=gpu_range.cu_seqlens_q[first : last + 1],
                query_pos=gpu_range.query_pos[first:last],
                first_block=records[0],
                kv_end=records[1],
                load_state=records[2],
                block_table=self.program.slot_table.expand(count, -1),
                max_query_len=int(self.lengths[first:last].max()),
                num_blocks=[len(chunk.blocks)] * count,
                query_rows=(int(self.lengths[:first].sum()), int(self.lengths[:last].sum())),
                store_state=True,
            )
            self._attend(layer, key_range, resources.slot_of(group, ring_slot))

    def _attend(self, layer: int, key_range: KeyRange, kv: torch.Tensor) -> None:
        resources, pieces = self.program.resources, self.program.resources.pieces
        group = resources.groups[pieces.reads[layer].group]
        backend, state = resources.backends[group.shape], None if self.states is None else self.states[group.shape]
        q, out = self.tensors.attention_rows(backend.spec, self.num_tokens)
        backend.prefill(q, kv, key_range, state, out, group.window, pieces.sinks[layer], pieces.own[layer])
