"""Which KV blocks each sequence holds, on the GPU and on the host.

In each group of layers a sequence's logical block s covers tokens [s * block_size, (s + 1) * block_size). It lies in
the GPU pool, in the host pool, or not yet anywhere, and behind the group's window nowhere any more:

    resident mode   every block lies in the GPU pool
    offload mode    every full block lies in the host pool, the tail (the block that still grows) in the GPU pool; the
                    GPU pool also keeps the newest full blocks, as many as there is room for

The block tables say where each logical block of each row lies. Attention reads nothing else, so any mixture works. A
block that lies in both pools is read on the GPU. Dropping its GPU copy costs nothing, so when GPU blocks are wanted,
full blocks are dropped (`Residency` says which). When there is room again, they come back as they pass through the
ring. Rows that share a host block share its GPU copy, too. The full blocks of a sequence that ends stay on the GPU
until their room is wanted, for the next sequence with the same beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nanoinfer.kv.gpu_copies import GPUCopies
from nanoinfer.kv.prefix_cache import PrefixCache
from nanoinfer.kv.tables import BlockTables, present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK


class _Coming(NamedTuple):
    """Of a sequence in a step that is being planned.

    on_host: blocks that become full and that later tokens see, which have host blocks in offload mode. beyond: GPU
    blocks in groups with a window that it was not promised in resident mode.
    """

    on_host: int
    beyond: int


class KVCache:
    """Rows and blocks of the admitted sequences: what they hold, are promised, and fill.

    `Admission` lets sequences in, `Mover` moves their blocks between GPU and host.

    Args:
        tables: where the blocks lie.
        copies: which full blocks have a copy on the GPU.
        end_token_ids: with which messages end in a prompt.
        store: copies (GPU block, host block) pairs to the host, under the number of an operation.

    Attributes:
        free_rows: rows without a sequence.
        slots: for the states of as many sequences as may have one at a time.
        num_promised_host: host blocks that are promised and not handed out yet.
        num_reserved_splits: blocks that all rows together can ever attend to.
        block_unit: the tokens of the smallest block of any group, of which those of the others are multiples.
        coming: of each sequence of the step that is being planned, what it takes for what it computes.
    """

    def __init__(
        self,
        tables: BlockTables,
        copies: GPUCopies,
        *,
        enable_prefix_caching: bool,
        end_token_ids: Iterable[int] = (),
        store: Callable[[list[tuple[int, int]], int], None],
    ) -> None:
        self.tables, self.copies, self._store = tables, copies, store
        self.prefixes = PrefixCache(tables, enable_prefix_caching, end_token_ids)
        self.free_rows = list(range(tables.num_rows - 1, -1, -1))
        self.slots = tables.lifetimes.slots
        self._of_row: dict[int, Sequence] = {}
        self.num_promised_host = self.num_reserved_splits = 0
        self.block_unit = min(group.block_size for group in tables.groups)
        self.coming: dict[Sequence, _Coming] = {}

    @property
    def num_unpromised_host(self) -> int:
        """Number of host blocks that are free, or will be once copies have run, and promised to no sequence, nor coming
        beside what was."""
        lifetimes = self.tables.lifetimes
        num_free = lifetimes.host_blocks.num_free + lifetimes.num_deferred_host
        return num_free - self.num_promised_host - self.num_beyond_host

    @property
    def num_beyond_host(self) -> int:
        """Number of host blocks that the step which is planned takes beside what was promised, in offload mode."""
        return sum(max(0, coming.on_host - one.num_promised_host) for one, coming in self.coming.items())

    @property
    def num_beyond_gpu(self) -> int:
        """As `num_beyond_host`, GPU blocks in resident mode."""
        return sum(coming.beyond for coming in self.coming.values())

    def promise_host(self, sequence: Sequence) -> None:
        """Promise the sequence what it needs of host blocks to become as long as it may, beside those that it has."""
        self.cancel_promise(sequence)
        count, tables = 0, self.tables
        for number, (group, full) in enumerate(zip(tables.groups, tables.full(sequence), strict=True)):
            there = np.flatnonzero(tables.host[number, sequence.row, full.start :] != NO_BLOCK)
            end = max(full.stop, full.start + int(there[-1]) + 1) if len(there) else full.stop  # it may be computing
            num_own = len(there) if group.window is None else tables.num_own(number, sequence.row)
            # What others count of its blocks may become its own, too.
            num_coming = sequence.max_num_tokens // group.block_size - end + len(there) - num_own
            count += max(0, min(group.most_full(sequence.max_num_tokens) - num_own, num_coming))
        sequence.num_promised_host = count
        self.num_promised_host += count

    def cancel_promise(self, sequence: Sequence) -> None:
        """Take back the promise of what the sequence has not filled."""
        self.num_promised_host -= sequence.num_promised_host
        sequence.num_promised_host = 0

    def take_row(self, sequence: Sequence) -> int:
        (sequence.state_slot,) = self.slots.allocate(1)
        sequence.row = self.free_rows.pop()
        self._of_row[sequence.row] = sequence
        self.tables.gpu_versions[sequence.row] += 1
        self.num_reserved_splits += self.tables.num_splits(sequence.max_num_tokens)
        return sequence.row

    @property
    def num_free_rows(self) -> int:
        """How many sequences more may have a row, and a slot for states."""
        num_running = self.tables.num_rows - len(self.free_rows)
        most = self.slots.num_blocks - self.tables.num_draft_slots - num_running
        return min(len(self.free_rows), self.slots.num_free, most)

    def num_spare_slots(self, num_waiting: int) -> int:
        """How many slots for states no sequence has, nor is any to have that one of so many others may take next."""
        return self.slots.num_free - min(num_waiting, self.num_free_rows)

    # States of drafted tokens

    @property
    def num_free_lines(self) -> int:
        """How many drafted tokens may have a row, and a slot for states."""
        return min(len(self.free_rows), self.slots.num_free) if self.tables.blocks_of_state else len(self.free_rows)

    def take_draft_slots(self, sequence: Sequence, count: int) -> None:
        """Take a slot for the state behind each of so many drafted tokens."""
        if self.tables.blocks_of_state:
            sequence.draft_slots = self.slots.allocate(count)

    def slot_of(self, sequence: Sequence, number: int) -> int:
        """Return the slot of the state behind the drafted token of this number, or behind the last token: 0."""
        return sequence.draft_slots[number - 1] if number and sequence.draft_slots else sequence.state_slot

    def take_state(self, sequence: Sequence) -> None:
        """Have the state behind the token that was drafted next be the sequence's own."""
        if sequence.draft_slots:
            slot, *left = sequence.draft_slots
            sequence.state_slot, sequence.draft_slots = slot, [*left, sequence.state_slot]

    def release_states(self, sequence: Sequence) -> None:
        """Give back all slots of a sequence but that of its own state."""
        slots, sequence.draft_slots = sequence.draft_slots, []
        self.tables.lifetimes.release_slots(slots)

    def begin(self, sequence: Sequence, num_found: int, num_known: int) -> None:
        """Note that the KV of so many tokens of an admitted sequence was found, and known of a beginning that may be
        longer."""
        sequence.num_computed = sequence.num_cached = num_found
        self.prefixes.begin(sequence, num_found, num_known)

    def take_host(self, count: int, group: int = 0) -> list[int]:
        """Hand out host blocks; wait for copies, if need be."""
        self.tables.lifetimes.wait_for_host(count)
        return self.tables.lifetimes.host_blocks.allocate(count, group)

    def max_chunk(self, sequence: Sequence, wanted: int) -> int:
        """Return for how many of the next `wanted` tokens the admitted sequence has, or can get, GPU blocks now."""
        tables, row, begin = self.tables, sequence.row, sequence.num_computed
        if wanted <= 0:
            return 0
        size = min(group.block_size for group in tables.groups)
        ends = np.arange(begin // size + 1, -(-(begin + wanted) // size) + 1) * size
        lacking, on_host = np.zeros((2, len(ends)), dtype=np.int64)
        for number, group in enumerate(tables.groups):
            first, last = begin // group.block_size, -(-int(ends[-1]) // group.block_size)
            on_host += group.num_filled(begin, ends)
            missing = np.cumsum(tables.gpu[number, row, first:last] == NO_BLOCK)
            of_ends = missing[(ends - 1) // group.block_size - first]
            lacking += np.maximum(of_ends - tables.promised[number, row], 0)
        num_fitting = int(np.searchsorted(lacking, max(0, self.copies.num_obtainable), side="right"))
        # What the step's rows see before it and behind it lies there at once.
        if sequence.num_promised_host and tables.windowed:
            room = sequence.num_promised_host + max(0, self.num_unpromised_host)
            num_fitting = min(num_fitting, np.count_nonzero(np.maximum.accumulate(on_host) <= room))
        return min(wanted, int(ends[num_fitting - 1]) - begin) if num_fitting else 0

    def without_slot(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the admitted sequences whose last token begins a block that they do not have yet; usually few."""
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        last = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64) - 1
        lacking = np.zeros(len(rows), dtype=bool)
        for number, group in enumerate(self.tables.groups):
            lacking |= self.tables.gpu[number, rows, last // group.block_size] == NO_BLOCK
        return [sequences[i] for i in np.flatnonzero(lacking)]

    def grow(self, sequence: Sequence, end: int) -> None:
        """Make sure that the tokens from `num_computed` to `end` have GPU blocks to be written to.

        Raises:
            MemoryError: too few free blocks; ask `max_chunk` before.
        """
        tables, row, missing = self.tables, sequence.row, []
        for number, group in enumerate(tables.groups):
            first, last = sequence.num_computed // group.block_size, -(-end // group.block_size)
            missing.append(first + np.flatnonzero(tables.gpu[number, row, first:last] == NO_BLOCK))
        if tables.windowed:
            on_host = sum(int(group.num_filled(sequence.num_computed, end)) for group in tables.groups)
            beyond = sum(max(0, len(missing[at]) - int(tables.promised[at, row])) for at in tables.windowed)
            self.coming[sequence] = _Coming(on_host, beyond)
        if not (count := sum(map(len, missing))):
            return
        tables.promised[:, row] = np.maximum(tables.promised[:, row] - [len(places) for places in missing], 0)
        taken = np.array(self.copies.take(count), dtype=np.int32)
        for number, places in enumerate(missing):
            tables.gpu[number, row, places], taken = taken[: len(places)], taken[len(places) :]
        tables.gpu_versions[row] += 1

    def take_promised(self, sequence: Sequence, end: int) -> list[list[tuple[int, int]]]:
        """Take a host block for each block that becomes full when `end` tokens are computed, in offload mode.

        Those that no later token sees get one only where that is at the cost of nothing that is cached but such as they
        are, the oldest first; or, if the next turn sees them, of nothing that was promised.

        Returns:
            For each group (GPU block, host block) pairs to write through.
        """
        tables, row, pairs, places_of = self.tables, sequence.row, [], []
        for number, group in enumerate(tables.groups):
            full = range(sequence.num_computed // group.block_size, end // group.block_size)
            first = group.first_needed(end)
            of_next = min(first, self.prefixes.end_blocks(sequence, number).start)  # where the next turn begins to see
            places_of.append((full, *(range(max(full.start, place), full.stop) for place in (first, of_next))))
        self.coming.pop(sequence, None)
        num_unpromised = max(0, self.num_unpromised_host)
        room = sequence.num_promised_host + num_unpromised
        has_room = sum(len(of_next) for *_, of_next in places_of) <= room  # else what this turn sees alone
        for full, *either in places_of:
            room -= len(either[has_room])
        num_spare = max(0, min(num_unpromised, room))
        for number, (full, *either) in enumerate(places_of):
            num_needed = len(either[has_room])
            num_more = min(len(full) - num_needed, num_spare, tables.lifetimes.host_blocks.num_spare)
            count, num_spare = num_needed + num_more, num_spare - num_more
            taken = self.take_host(count, number) if count else []
            num_promised = min(num_needed, sequence.num_promised_host)
            sequence.num_promised_host -= num_promised
            self.num_promised_host -= num_promised
            places = full[len(full) - count :]
            tables.host[number, row, places.start : places.stop] = taken
            pairs.append([(int(tables.gpu[number, row, s]), block) for s, block in zip(places, taken, strict=True)])
        return pairs

    def commit(self, sequence: Sequence, end: int) -> None:
        """Note that the tokens up to `end` have their KV, or will have by the time that later work reads it."""
        tables, row, was = self.tables, sequence.row, sequence.num_computed
        sequence.num_computed = end
        has_filled = was // self.block_unit != end // self.block_unit
        if not (has_filled or tables.windowed):
            return  # each row of each step comes here
        self.coming.pop(sequence, None)
        if has_filled:
            self.prefixes.publish(sequence)
        has_left = self.leave_windows(sequence)
        if not (has_filled or has_left):
            return
        if not sequence.num_promised_host and not present(tables.host[:, row]):
            self.promise_windows(sequence)  # the GPU's blocks are the only ones: no copies that can be dropped
        else:
            self.promise_host(sequence)
            self.copies.set_resident_from(
                sequence, [int(self.copies.residency.first[line]) for line in self.copies.lines([row])]
            )
            self.copies.promise_tails(sequence)
            self.copies.drop_above_limit()

    def store_filled(self, sequence: Sequence, end: int) -> None:
        """Have the blocks copied to the host, in offload mode, that `end` tokens fill, all of them computed."""
        if sequence.num_computed // self.block_unit != end // self.block_unit:
            pairs = [pair for of_group in self.take_promised(sequence, end) for pair in of_group]
            if pairs:
                self._store(pairs, self.tables.lifetimes.begin([on_gpu for on_gpu, _ in pairs]))

    def leave_windows(self, sequence: Sequence) -> bool:
        """Give back the blocks that no later token of the sequence sees. Return whether there are any.

        The prompt's next turn wants those before its end; others are evicted before anything else that is cached.
        """
        tables, row, has_left, others = self.tables, sequence.row, False, set()
        for number in tables.windowed:
            begin, first = int(tables.begins[number, row]), tables.groups[number].first_needed(sequence.num_computed)
            if first <= begin:
                continue
            has_left = True
            wanted = self.prefixes.end_blocks(sequence, number).start
            for table, pool in ((tables.gpu, tables.gpu_blocks), (tables.host, tables.lifetimes.host_blocks)):
                pool.note_spent(present(table[number, row, begin : min(first, wanted)]))
            for place in range(max(begin, wanted), first):  # copies of what the host has, in offload mode
                content = self.prefixes.content(sequence, number, place)
                if content is not None and (block := int(tables.gpu[number, row, place])) != NO_BLOCK:
                    tables.gpu_blocks.publish(block, content)
            others |= tables.pass_on(number, row, begin, first)
            passed = number, row, slice(begin, first)
            on_gpu, on_host = present(tables.gpu[passed]), present(tables.host[passed])
            tables.gpu[passed] = tables.host[passed] = NO_BLOCK
            tables.begins[number, row] = first
            tables.gpu_versions[row] += 1  # what was prefetched of a host block is worthless, too
            tables.lifetimes.release_gpu(on_gpu)
            tables.lifetimes.release_host(on_host)
        self._promise_again(others)
        return has_left

    def _promise_again(self, rows: Iterable[int]) -> None:
        """Promise rows less, which count blocks that others have left, or more, which count some no more."""
        for row in rows:
            (self.promise_host if present(self.tables.host[:, row]) else self.promise_windows)(self._of_row[row])

    def promise_windows(self, sequence: Sequence) -> None:
        """Promise the row GPU blocks, in resident mode, with which it can go on where a window bounds what it holds."""
        tables, row = self.tables, sequence.row
        for number in tables.windowed:
            most = tables.groups[number].most_blocks(sequence.max_num_tokens)
            tables.promised[number, row] = max(0, most - tables.num_own(number, row))

    def release(self, sequence: Sequence, *, leave_copies: bool = False) -> None:
        """Give back the row, the slot and every block of an admitted sequence.

        leave_copies: let the next sequence with the same beginning find the full blocks on the GPU. Not after a step
        that failed, since nobody knows what it wrote.
        """
        row = sequence.row
        assert row is not None, "only an admitted sequence holds blocks"
        if leave_copies:
            self.copies.leave(row)
        tables = self.tables
        others = {other for number in tables.windowed for other in tables.pass_on(number, row, 0)}
        self._renew_windows(sequence)
        self.prefixes.renew_states(sequence)
        for gpu, host in zip(tables.gpu[:, row], tables.host[:, row], strict=True):
            on_gpu, on_host = present(gpu), present(host)
            # Of copies a row keeps the newest, so the oldest are evicted first. Of a beginning the last goes first.
            tables.lifetimes.release_gpu(on_gpu[::-1] if on_host else on_gpu)
            tables.lifetimes.release_host(on_host)
        tables.gpu[:, row] = tables.host[:, row] = NO_BLOCK
        tables.begins[:, row] = tables.promised[:, row] = 0
        tables.gpu_versions[row] += 1
        self.cancel_promise(sequence)
        self.num_reserved_splits -= tables.num_splits(sequence.max_num_tokens)
        del self._of_row[row]
        slot, sequence.row, sequence.state_slot = sequence.state_slot, None, None
        tables.lifetimes.release_slots([slot])
        self.release_states(sequence)
        self.copies.clear(row)
        self.free_rows.append(row)
        self._promise_again(others)

    def _renew_windows(self, sequence: Sequence) -> None:
        """Have what the sequence has given back and its next turn wants evicted no earlier than what it holds."""
        pool = self.tables.home[1]
        for number in self.tables.windowed:
            for place in self.prefixes.end_blocks(sequence, number):
                content = self.prefixes.content(sequence, number, place)
                if content is None or place >= self.tables.begins[number, sequence.row]:
                    break
                if (block := pool.published(content)) is not None:
                    pool.renew(block)

    def recover(self, running: list[Sequence], others: list[Sequence]) -> None:
        """Empty every row but those of the `running` sequences, and forget all promises: the numbers may contradict.

        others: sequences that wait or have ended. What has no kept blocks is computed anew.
        """
        self.num_promised_host = 0
        self._of_row = {sequence.row: sequence for sequence in running}
        self.coming.clear()
        self.num_reserved_splits = sum(self.tables.num_splits(sequence.max_num_tokens) for sequence in running)
        for sequence in [*running, *others]:
            sequence.num_promised_host, sequence.draft_slots = 0, []
        for sequence in others:
            sequence.row = sequence.state_slot = None
            if not sequence.is_finished and sequence.kept_blocks is None:
                sequence.num_computed = sequence.num_cached = 0
        tables = self.tables
        free = np.setdiff1d(np.arange(tables.num_rows), [sequence.row for sequence in running])
        tables.gpu[:, free] = tables.host[:, free] = NO_BLOCK
        tables.begins[:, free] = 0
        tables.promised[:] = 0
        tables.owners.clear()
        self.free_rows = free[::-1].tolist()
        self.slots.rebuild([sequence.state_slot for sequence in running])
        for row in free.tolist():
            self.copies.clear(row)
