"""Turn a batch of sequences into a step plan, and note what the launched step has done to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np

from nanoinfer.kv.cache import KVCache
from nanoinfer.requests.sequence import Sequence
from nanoinfer.sampling.settings import RowSampling
from nanoinfer.step.batch import Batch, PrefillChunk
from nanoinfer.step.plan import NUM_HEAD_COLUMNS, ON_DEVICE, PromptChunk, StepPlan

UNKNOWN = -1


class StepPlanner:
    """Plans steps, and knows which rows and settings on the device are out of date.

    Args:
        end_token_ids: the model's own end tokens, which `min_tokens` bans with the request's stop tokens.

    Attributes:
        sent_versions: for each row, what `BlockTables.gpu_versions` was when its blocks were last sent to the device; a
            row where the two differ is sent again. `UNKNOWN`: the device does not have them.
        last: the newest plan, if it changes nothing but lengths, with its sequences and the sum of all rows'
            `gpu_versions`. These only count up: with the same sum no block of any row has come or gone.
    """

    def __init__(self, kv_cache: KVCache, end_token_ids: Iterable[int]) -> None:
        self._kv_cache, self._number = kv_cache, 0
        self._end_token_ids = frozenset(end_token_ids)
        self.sent_versions = np.full(kv_cache.tables.num_rows, UNKNOWN, dtype=np.int64)
        self._settings_of = [UNKNOWN] * kv_cache.tables.num_rows  # of each row: whose settings the device has
        self.last: tuple[StepPlan, list[Sequence], int] | None = None

    def forget(self) -> None:
        """Send every row again: after an exception, the device may hold anything."""
        self.last = None
        self.sent_versions[:] = UNKNOWN
        self._settings_of = [UNKNOWN] * len(self._settings_of)

    def begin_step(self, batch: Batch[Sequence]) -> StepPlan:
        """Take the host blocks and GPU copies that the step needs, and describe the step.

        Every member already has the GPU blocks that the step writes to (`KVCache.grow`).
        """
        if self._kv_cache.tables.is_offload:
            self._count_blocks_read(batch.sequences)
        plan = self._repeated(batch) or self._made(batch)
        self._number += 1
        return plan

    def _repeated(self, batch: Batch[Sequence]) -> StepPlan | None:
        """Return the newest plan with new lengths if nothing else can have changed since; else None.

        Nothing else has changed if the sequences are the same, none of their blocks becomes full, and no GPU block of
        any row has come or gone: what found no room on the GPU then finds none now.
        """
        tables, decoding = self._kv_cache.tables, batch.decoding
        if batch.chunks or batch.drafts or self.last is None or self.last[1:] != (decoding, tables.gpu_versions.sum()):
            return None
        ends = np.array([sequence.num_tokens for sequence in decoding], dtype=np.int64)
        if np.any(ends % self._kv_cache.block_unit == 0):
            return None
        operation = tables.lifetimes.begin() if tables.is_offload else 0
        return replace(self.last[0], number=self._number, begins=ends - 1, ends=ends, operation=operation)

    def _made(self, batch: Batch[Sequence]) -> StepPlan:
        kv_cache, chunks, decoding, sampled = self._kv_cache, batch.chunks, batch.decoding, batch.sampled
        lines, tables = list(batch.lines()), kv_cache.tables
        # Drafted tokens lie in rows that no sequence has; what these hold is worthless to whoever gets them.
        spare = iter(kv_cache.free_rows)
        owners = np.array([sequence.row for sequence, *_ in lines], dtype=np.int32)
        rows = np.array([next(spare) if number else one.row for one, number, _ in lines], dtype=np.int32)
        ends = np.array([one.num_tokens + number for one, number, _ in lines], dtype=np.int64)
        write_through, promoted, operation, gone = (), None, 0, ()
        if tables.is_offload:
            taken = [kv_cache.take_promised(chunk.sequence, chunk.end) for chunk in chunks]
            taken += [kv_cache.take_promised(sequence, sequence.num_tokens) for sequence in decoding]
            write_through = tuple(tuple(chain(*of_group)) for of_group in zip(*taken, strict=True))
            write_through = write_through if any(write_through) else ()
        own_rows = np.array([sequence.row for sequence in decoding], dtype=np.int32)
        changed = self._changed_lines(decoding, own_rows)
        sampling = self._changed_settings(sampled)
        if batch.drafts:
            guessed = [(row, *line) for row, line in zip(rows.tolist(), lines, strict=True) if line[1]]
            changed = np.concatenate([changed, self._draft_lines(guessed)])
            sampling += tuple((row, self._settings(one, batch.drafts[one][:number])) for row, one, number, _ in guessed)
        of_chunks = np.array([chunk.sequence.row for chunk in chunks], dtype=np.int32)
        all_rows, homes = np.concatenate([of_chunks, rows]), np.concatenate([of_chunks, owners])
        longest = max([*(chunk.end for chunk in chunks), int(ends.max(initial=0))])
        width = tables.groups.table_width(longest)
        gpu_blocks, host_blocks = tables.gpu[:, homes, :width], tables.host[:, homes, :width]
        if tables.is_offload:
            promoted = kv_cache.copies.promote(own_rows.tolist())
            operation = tables.lifetimes.begin([gpu_block for gpu_block, _ in chain(*write_through)])
            gone = tables.lifetimes.take_gone()
        plan = StepPlan(
            number=self._number,
            chunks=tuple(map(_prompt_chunk, chunks)),
            rows=rows,
            state_slots=np.array([kv_cache.slot_of(one, number) for one, number, _ in lines], dtype=np.int32),
            num_lines=np.array([1 + len(batch.drafts.get(one, ())) for one in decoding], dtype=np.int32),
            begins=ends - 1,
            ends=ends,
            gpu_blocks=gpu_blocks,
            host_blocks=host_blocks,
            later_gpu_blocks=None if promoted is None else tables.gpu[:, owners, :width],
            changed_rows=changed,
            sampling=sampling,
            sampled_rows=all_rows[[*(chunk.is_last for chunk in chunks), *[True] * len(rows)]] if chunks else rows,
            num_logprobs={
                place: sequence.params.logprobs
                for place, sequence in enumerate(batch.sampled_lines)
                if sequence.params.logprobs is not None
            },
            write_through=write_through,
            promoted=promoted or {},
            operation=operation,
            gone_host_blocks=gone,
        )
        changes = chunks or len(changed) or sampling or write_through or gone or promoted is not None
        # A block that a drafted token has begun is there already when the step behind the full one reads it.
        fills = np.any(ends % kv_cache.block_unit == 0)
        self.last = None if changes or fills else (plan, decoding, tables.gpu_versions.sum())
        return plan

    def end_step(self, batch: Batch[Sequence], plan: StepPlan) -> None:
        """Note that the step was launched: whatever reads KV later reads what it writes."""
        for chunk in batch.chunks:
            self._kv_cache.commit(chunk.sequence, chunk.end)
            if chunk.is_last:
                self.sent_versions[chunk.sequence.row] = UNKNOWN  # length and token, too, are not those on the device
        for sequence in batch.decoding:
            self._kv_cache.commit(sequence, sequence.num_tokens)
        for sequence in batch.sampled:
            sequence.num_tokens += 1

    def accept(self, sequence: Sequence) -> None:
        """Note that the token drafted next for a sequence was right, and was taken: its KV is that of its place."""
        if self._kv_cache.tables.is_offload:
            self._kv_cache.store_filled(sequence, sequence.num_tokens)
        self._kv_cache.commit(sequence, sequence.num_tokens)
        self._kv_cache.take_state(sequence)
        sequence.num_tokens += 1
        # The device knows neither its length nor its token, nor how many were sampled.
        self.sent_versions[sequence.row], self._settings_of[sequence.row] = UNKNOWN, UNKNOWN

    def _draft_lines(self, guessed: list[tuple[int, Sequence, int, int]]) -> np.ndarray:
        """Return the lines of `StepPlan.changed_rows` of drafted tokens, each with its row before what `Batch.lines`
        says."""
        table = self._kv_cache.tables.gpu
        found = np.zeros((len(guessed), NUM_HEAD_COLUMNS + table.shape[0] * table.shape[2]), dtype=np.int32)
        for line, (row, sequence, number, token_id) in zip(found, guessed, strict=True):
            line[:NUM_HEAD_COLUMNS] = row, token_id, sequence.num_tokens + number
            line[NUM_HEAD_COLUMNS:] = np.maximum(table[:, sequence.row], 0).reshape(-1)
            self._settings_of[row] = UNKNOWN  # its blocks are sent to whoever takes the row, in any case
        return found

    def _changed_lines(self, sequences: list[Sequence], rows: np.ndarray) -> np.ndarray:
        """Return `StepPlan.changed_rows` for these sequences, whose rows are `rows`, and count them as sent."""
        table, versions = self._kv_cache.tables.gpu, self._kv_cache.tables.gpu_versions
        changed = np.flatnonzero(self.sent_versions[rows] != versions[rows])
        lines = np.zeros((len(changed), NUM_HEAD_COLUMNS + table.shape[0] * table.shape[2]), dtype=np.int32)
        for line, place in zip(lines, changed.tolist(), strict=True):
            sequence = sequences[place]
            # A pending token is known to the device only, which has put it into the row already.
            token = ON_DEVICE if sequence.num_pending else sequence.token_ids[-1]
            line[:NUM_HEAD_COLUMNS] = sequence.row, token, sequence.num_tokens
            line[NUM_HEAD_COLUMNS:] = np.maximum(table[:, sequence.row], 0).reshape(-1)
        self.sent_versions[rows] = versions[rows]
        return lines

    def _changed_settings(self, sequences: list[Sequence]) -> tuple[tuple[int, RowSampling], ...]:
        """Return the settings of the sequences whose row last sampled for another one, and count them as sent."""
        found = []
        for sequence in sequences:
            if self._settings_of[sequence.row] != sequence.sequence_id:
                assert not sequence.num_pending, "a token that only the device knows is missing in what is uploaded"
                found.append((sequence.row, self._settings(sequence)))
                self._settings_of[sequence.row] = sequence.sequence_id
        return tuple(found)

    def _settings(self, sequence: Sequence, draft: Collection[int] = ()) -> RowSampling:
        """Return what a sequence samples with behind its last token, and these drafted ones."""
        params = sequence.params
        return RowSampling.from_params(
            params,
            seed=sequence.seed,
            step=sequence.num_sampled + len(draft),
            penalty_token_ids=(*sequence.token_ids, *draft) if params.repetition_penalty != 1 else (),
            output_token_ids=[*sequence.output_token_ids, *draft],
            # A grammar's masks ban what would end it too early.
            end_token_ids=() if sequence.matcher else self._end_token_ids.union(params.stop_token_ids or ()),
            limits=None if sequence.limits is None else sequence.limits.in_line,
        )

    def _count_blocks_read(self, sequences: list[Sequence]) -> None:
        """Add to each sequence's counts how many full blocks the step reads, and how many of them lie on the GPU."""
        residency, rows = self._kv_cache.copies.residency, [sequence.row for sequence in sequences]
        shape = len(self._kv_cache.tables.groups), -1
        read = (residency.full - residency.begin).reshape(shape)[:, rows].sum(axis=0)
        resident = (residency.full - residency.first).reshape(shape)[:, rows].sum(axis=0)
        for sequence, num_read, num_resident in zip(sequences, read.tolist(), resident.tolist(), strict=True):
            sequence.num_blocks_read += num_read
            sequence.num_resident_read += num_resident


def _prompt_chunk(chunk: PrefillChunk[Sequence]) -> PromptChunk:
    sequence, begin, end = chunk.sequence, chunk.begin, chunk.end
    top, scored = sequence.num_prompt_logprobs, {}
    if top is not None:
        behind = sequence.prompt_token_ids[begin + 1 : end + 1]  # behind the last one comes what is sampled
        scored = dict(next_token_ids=np.array(behind, dtype=np.int32), num_logprobs=top)
    token_ids = np.array(sequence.token_ids[begin:end], dtype=np.int32)
    states = dict(state_slot=sequence.state_slot, passed=chunk.passed)
    return PromptChunk(sequence.row, begin, end, token_ids, chunk.is_last, **states, **scored)
