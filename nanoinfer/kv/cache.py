"""Which KV blocks each sequence holds, on the GPU and on the host.

A sequence's logical block s covers tokens [s * block_size, (s + 1) * block_size). It lies in the GPU pool, in the host
pool, or not yet anywhere:

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

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nanoinfer.common.units import format_gib
from nanoinfer.kv.prefix_cache import PrefixCache
from nanoinfer.kv.residency import MAX_PROMOTED, Residency, promotion_margin
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK
from offload import BlockPool, KVLayout, OffloadEngine
from offload.engine import STORE_GROUP
from offload.memory.saved_kv import SavedKV


@dataclass(frozen=True)
class _Refusal:
    """Why a sequence was not admitted. Holds until enough blocks were given back, or more of the prefix is known.

    Attributes:
        pool: the pool in which the prefix was looked up.
        next_key: key of the first block that was not found; None where every block that may be shared was found.
        num_given_back: value of `KVCache._num_given_back` from which on there may be room.
        num_own: number of the sequence's blocks that no running sequence had, if there was room but the sequence would
            have slowed the running ones; None if there was no room.
    """

    sequence: Sequence
    pool: BlockPool
    next_key: bytes | None
    num_given_back: int
    num_own: int | None

    def holds(self, sequence: Sequence, pool: BlockPool, num_given_back: int) -> bool:
        """Whether `sequence` need not be tried again."""
        if sequence is not self.sequence or pool is not self.pool or num_given_back >= self.num_given_back:
            return False
        return self.next_key is None or pool.published(self.next_key) is None


class GPUBlockCopies(Protocol):
    """Acts on blocks of the GPU pool between two steps."""

    def save(self, blocks: list[int]) -> SavedKV:
        """Copy blocks to the host. Raise MemoryError if there is no room for them."""

    def restore(self, saved: SavedKV, first: int, blocks: list[int]) -> None:
        """Copy saved blocks, from number `first` on, to `blocks`."""

    def poison(self, blocks: list[int]) -> None:
        """Overwrite blocks that nobody holds any more, in runtimes that look for wrong reads."""


class KVCache:
    """Hands out rows and blocks to sequences, shares equal prefixes, and moves blocks between the pools.

    Args:
        num_gpu_blocks: blocks of the GPU pool. Block 0 is scratch: padding rows write there.
        max_num_seqs: number of rows.
        max_blocks_per_seq: logical blocks of a row.
        max_splits: blocks that all rows together may attend to; a shared block counts once for each of its rows.
        max_resident_blocks: full blocks that may stay on the GPU in offload mode; None: as many as there is room for.
        window: the widest sliding window of the layers that have one, in tokens.
        only_if_faster: in offload mode, a sequence whose blocks find no room on the GPU is admitted only if that does
            not lower the tokens per second of all sequences together.

    Attributes:
        gpu_table, host_table: [max_num_seqs, max_blocks_per_seq] int32, where each row's blocks lie (or `NO_BLOCK`).
        table_versions: [max_num_seqs] int64, changes when the part of a row's GPU table does that decode steps need.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_gpu_blocks: int,
        copies: GPUBlockCopies,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        max_splits: int,
        enable_prefix_caching: bool,
        max_resident_blocks: int | None = None,
        window: int | None = None,
        only_if_faster: bool = False,
    ) -> None:
        self.layout = layout
        self.max_splits = max_splits
        self.block_size = layout.block_size
        self.gpu_blocks = BlockPool(num_gpu_blocks, first=1)
        self.gpu_table = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.host_table = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.table_versions = np.zeros(max_num_seqs, dtype=np.int64)
        self.offload: OffloadEngine | None = None  # set while in offload mode
        self._copies = copies
        self.prefixes = PrefixCache(layout.block_size, enable_prefix_caching)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_reserved_host = 0
        self._num_reserved_splits = 0
        self._num_given_back = 0  # blocks, and promises of blocks, that sequences ever gave back
        self._refusal: _Refusal | None = None  # of the newest sequence that found no room
        self._rows_without_tail: set[int] = set()  # offload: rows to which a GPU block is promised
        self.residency = Residency(max_num_seqs, self.gpu_table, self.host_table, joins=window is None)
        self._max_resident_blocks = max_resident_blocks
        self._window = window
        self._only_if_faster = only_if_faster

    # Admission

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row and its blocks (resident) or a promise of them (offload), if there is room.

        Take up the blocks of an equal prefix, or restore the KV saved at preemption; the caller drops the saved KV once
        the sequence counts as running. Return False, with nothing changed, if there is no room.
        """
        if not self._free_rows:
            return False
        # Rows that share blocks need few blocks, but attend to as many splits as others.
        if self._num_reserved_splits + self._num_blocks(sequence.max_num_tokens) > self.max_splits:
            return False
        if sequence.saved is not None:
            admitted = self._admit_saved(sequence)
            if admitted:
                self.publish(sequence)  # under its new blocks; `commit` publishes later ones
            return admitted
        if self._is_refused_again(sequence):
            return False
        hits = self._admit_resident(sequence) if self.offload is None else self._admit_offload(sequence)
        if hits is None:
            return False
        sequence.num_computed = sequence.num_cached = len(hits) * self.block_size
        sequence.num_published = len(hits)
        self.prefixes.count(sequence, len(hits))
        return True

    def _admit_resident(self, sequence: Sequence) -> list[int] | None:
        """Returns the blocks of the sequence's prefix that were found, or None if there is no room."""
        hits = self.prefixes.find(sequence, self.gpu_blocks)
        missing = self._num_blocks(sequence.num_tokens) - len(hits)
        if missing > self.gpu_blocks.num_free:
            self._refuse(sequence, hits, self.gpu_blocks, missing - self.gpu_blocks.num_free)
            return None
        row = self._take_row(sequence)
        blocks = hits + self.gpu_blocks.allocate(missing)
        self.gpu_table[row, : len(blocks)] = blocks
        return hits

    def _admit_offload(self, sequence: Sequence) -> list[int] | None:
        """Promise every host block that the sequence can ever fill, so that it is never preempted later.

        Return the same as `_admit_resident`.
        """
        assert self.offload is not None
        if self.num_obtainable < 1:
            return None
        host = self.offload.host.blocks
        hits = self.prefixes.find(sequence, host)
        reserve = sequence.max_num_tokens // self.block_size - len(hits)
        num_short, num_own = reserve - self._num_unpromised_host, self._num_own_blocks(sequence, hits)
        if num_short > 0 or not self._keeps_throughput(num_own):
            self._refuse(sequence, hits, host, max(1, num_short), num_own if num_short <= 0 else None)
            return None
        row = self._take_row(sequence)
        self.host_table[row, : len(hits)] = hits
        self._reserve_host(sequence, reserve)
        copies = self._find_copies(hits)
        self.gpu_table[row, len(hits) - len(copies) : len(hits)] = copies
        self._note_residency(row, first=len(hits) - len(copies), num_computed=len(hits) * self.block_size)
        self._promise_tail(row)
        self._limit_residency()
        return hits

    def _refuse(
        self, sequence: Sequence, hits: list[int], pool: BlockPool, num_short: int, num_own: int | None = None
    ) -> None:
        """Give back the prefix that was found. Remember what must change first: looking the prefix up takes long."""
        next_key = self.prefixes.key_behind(sequence, len(hits))
        pool.release(hits)
        self._refusal = _Refusal(sequence, pool, next_key, self._num_given_back + num_short, num_own)

    def _is_refused_again(self, sequence: Sequence) -> bool:
        """Whether the sequence would be refused for the same reason as before."""
        refusal, (_, pool) = self._refusal, self._home()
        if refusal is None or not refusal.holds(sequence, pool, self._num_given_back):
            return False
        return refusal.num_own is None or not self._keeps_throughput(refusal.num_own)

    def _find_copies(self, host_blocks: list[int]) -> list[int]:
        """Take up the GPU copies of the last of these host blocks, held by running sequences or left by ended ones.

        Stop at the first block, from the end, that has no copy: a row keeps its newest blocks.
        """
        assert self.offload is not None
        copies: list[int] = []
        for place, host_block in reversed(list(enumerate(host_blocks))):
            copy = self.residency.copy(place, host_block)
            if copy is not None:
                self.gpu_blocks.share(copy)
            else:
                copy = self.gpu_blocks.published(host_block)
                if copy is None or not (self.offload.take_back_gpu(copy) or self.gpu_blocks.claim(copy)):
                    break
            self.gpu_blocks.forget(host_block)  # so that resident mode can publish it under its tokens
            copies.append(copy)
        return copies[::-1]

    def _leave_copies(self, row: int) -> None:
        """Publish the row's GPU blocks, each under the number of the host block that it is a copy of.

        The number is forgotten when the host block is handed out again. Tokens would not do as a key: two sequences
        with an equal beginning may each have computed it, one of them as its own output, and the published host block
        is a copy of only one of the two.
        """
        if self.offload is None or self._window is not None:
            return  # blocks that came back through the ring lack layers whose window had moved on
        for block in range(int(self.residency.first[row]), int(self.residency.full[row])):
            host_block = int(self.host_table[row, block])
            if self.offload.host.blocks.is_published(host_block):
                self.gpu_blocks.publish(int(self.gpu_table[row, block]), host_block)

    @property
    def _num_unpromised_host(self) -> int:
        """Number of host blocks that are free, or will be once copies have run, and promised to no sequence."""
        assert self.offload is not None
        return self.offload.host.blocks.num_free + self.offload.num_deferred_host - self._num_reserved_host

    def _num_own_blocks(self, sequence: Sequence, hits: list[int]) -> int:
        """Number of the sequence's blocks that no running one has.

        Host blocks that it shares with a running sequence need no further room, and stream once for all.
        """
        num_shared = int((self.host_table[:, : len(hits)] == hits).any(axis=0).sum())
        return self._num_blocks(sequence.num_tokens) - num_shared

    def _keeps_throughput(self, num_blocks: int) -> bool:
        """Whether one more sequence, with `num_blocks` blocks of its own, does not lower the tokens per second of all.

        A step of n sequences that streams s blocks takes about s / link. With one more sequence of b blocks, for which
        the GPU has no room, (n + 1) / (s + b) >= n / s holds where b <= s / n: the bandwidth need not be known.
        """
        if not self._only_if_faster or num_blocks <= self.gpu_room:
            return True
        num_running = len(self.gpu_table) - len(self._free_rows)
        return num_running == 0 or num_blocks * num_running <= self.num_streamed

    def _reserve_host(self, sequence: Sequence, count: int) -> None:
        sequence.num_reserved_host = count
        self._num_reserved_host += count

    def _take_row(self, sequence: Sequence) -> int:
        sequence.row = self._free_rows.pop()
        self.table_versions[sequence.row] += 1
        self._num_reserved_splits += self._num_blocks(sequence.max_num_tokens)
        return sequence.row

    # Growth

    @property
    def gpu_room(self) -> int:
        """Number of GPU blocks that can be handed out with nothing dropped. Does not depend on how fast copies are."""
        room = self.gpu_blocks.num_free - len(self._rows_without_tail)
        return room if self.offload is None else room + self.offload.num_deferred_gpu

    @property
    def num_obtainable(self) -> int:
        """Number of GPU blocks that can be handed out, including copies of full blocks, which can be dropped."""
        return self.gpu_room + self.num_resident

    @property
    def num_resident(self) -> int:
        """Number of GPU copies of full blocks, all of which can be dropped; 0 in resident mode."""
        # In offload mode no other GPU blocks are shared.
        return 0 if self.offload is None else self.residency.num_resident - self.gpu_blocks.num_shared

    @property
    def num_streamed(self) -> int:
        """Number of host blocks that a step of all rows streams: those of which some row has no GPU copy."""
        num_streamed, first = self.residency.num_streamed, self.residency.first
        if self.offload is None or not num_streamed or not self.offload.host.blocks.num_shared:
            return num_streamed
        streams = np.arange(first.max()) < first[:, None]
        return int(np.count_nonzero(np.bincount(self.host_table[:, : first.max()][streams])))

    def max_chunk(self, sequence: Sequence, wanted: int) -> int:
        """Return for how many of the next `wanted` tokens the admitted sequence has, or can get, GPU blocks now."""
        row = sequence.row
        first, tokens_in_tail = divmod(sequence.num_computed, self.block_size)
        held = int((self.gpu_table[row, first:] != NO_BLOCK).sum()) + (row in self._rows_without_tail)
        return min(wanted, (held + max(0, self.num_obtainable)) * self.block_size - tokens_in_tail)

    def without_slot(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the admitted sequences whose last token begins a block that they do not have yet; usually few."""
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        last = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64) - 1
        lacking = self.gpu_table[rows, last // self.block_size] == NO_BLOCK
        return [sequences[i] for i in np.flatnonzero(lacking)]

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """GPU blocks to allocate before tokens up to `end` (exclusive) can be computed."""
        first = sequence.num_computed // self.block_size
        return int((self.gpu_table[sequence.row, first : self._num_blocks(end)] == NO_BLOCK).sum())

    def grow(self, sequence: Sequence, end: int) -> None:
        """Makes sure that the tokens from `num_computed` to `end` have GPU blocks to be written to.

        Raises:
            MemoryError: too few free blocks; ask `max_chunk` or `num_missing` before.
        """
        row = sequence.row
        first = sequence.num_computed // self.block_size
        missing = first + np.flatnonzero(self.gpu_table[row, first : self._num_blocks(end)] == NO_BLOCK)
        if len(missing) == 0:
            return
        self._rows_without_tail.discard(row)
        self.gpu_table[row, missing] = self._take_gpu(len(missing))
        self.table_versions[row] += 1

    def _take_gpu(self, count: int) -> list[int]:
        """Hands out GPU blocks; in offload mode drops full ones and waits for copies, if need be."""
        if self.offload is not None:
            self._drop(count - self.gpu_room)
            self.offload.reclaim()
            self.offload.wait_for_gpu(count)
        return self.gpu_blocks.allocate(count)

    def _take_host(self, count: int) -> list[int]:
        """Hands out promised host blocks; waits for copies, if need be."""
        assert self.offload is not None
        self.offload.wait_for_host(count)
        return self._allocate_host(self.offload, count)

    def _allocate_host(self, offload: OffloadEngine, count: int) -> list[int]:
        blocks = offload.host.blocks.allocate(count)
        for block in blocks:
            self.gpu_blocks.forget(block)  # what was left on the GPU is a copy of something else
        return blocks

    def _promise_tail(self, row: int) -> None:
        """Promise the row, which has no partly filled block, a GPU block for when it grows."""
        self._rows_without_tail.add(row)
        self._drop(-self.gpu_room)

    def _lacks_tail(self, sequence: Sequence) -> bool:
        """Whether the sequence lacks the block behind its last full one, into which the next token goes."""
        tail = sequence.num_computed // self.block_size
        return tail == self.gpu_table.shape[1] or self.gpu_table[sequence.row, tail] == NO_BLOCK

    def _drop(self, count: int) -> None:
        """Drop up to `count` GPU copies of full blocks, all of which the host has, too."""
        if count <= 0:
            return
        assert self.offload is not None
        dropped = self.residency.drop(min(count, self.num_resident))
        rows, places = np.array(dropped, dtype=np.int64).reshape(-1, 2).T
        self.offload.release_gpu(self.gpu_table[rows, places].tolist())
        self.gpu_table[rows, places] = NO_BLOCK

    def _note_residency(self, row: int, first: int, num_computed: int) -> None:
        """Note that the row's full blocks from `first` on lie on the GPU; those that a window reads stay longest."""
        full = window = num_computed // self.block_size
        if self._window is not None:
            window = max(0, num_computed - self._window + 1) // self.block_size
        self.residency.set(row, first, full, window)

    def promote(self, rows: list[int]) -> dict[int, int]:
        """Allocate GPU blocks for full blocks that stream in this step, where there is room, and note them as resident.

        The caller must copy their content from the ring to the GPU pool while this step runs.

        Args:
            rows: the rows of this step. Any other row would hold blocks without content if the step failed.

        Returns:
            Host block -> GPU block.
        """
        if self.offload is None or not self.residency.num_streamed:
            return {}
        for row, block, gpu_block in self.residency.join(rows):
            self.gpu_blocks.share(gpu_block)
            self.gpu_table[row, block] = gpu_block
            self.table_versions[row] += 1
        count = min(MAX_PROMOTED, self.gpu_room - promotion_margin(len(rows)))
        if self._max_resident_blocks is not None:
            count = min(count, self._max_resident_blocks - self.num_resident)
        if count <= 0:
            return {}
        promoted = self.residency.promote(count, rows)
        new = iter(self._take_gpu(len({int(self.host_table[place]) for place in promoted})))
        result: dict[int, int] = {}
        for row, block in promoted:
            host_block = int(self.host_table[row, block])
            if host_block in result:
                self.gpu_blocks.share(result[host_block])
            else:
                result[host_block] = next(new)
            self.gpu_table[row, block] = result[host_block]
            self.table_versions[row] += 1
        return result

    def fill(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """In offload mode, allocate a host block for each block that becomes full when `end` tokens are computed.

        Returns:
            (GPU block, host block) pairs to write through; empty in resident mode.
        """
        if self.offload is None:
            return []
        row = sequence.row
        full = range(sequence.num_computed // self.block_size, end // self.block_size)
        if not full:
            return []
        host_blocks = self._take_host(len(full))
        sequence.num_reserved_host -= len(full)
        self._num_reserved_host -= len(full)
        self.host_table[row, full.start : full.stop] = host_blocks
        return [(int(self.gpu_table[row, s]), block) for s, block in zip(full, host_blocks, strict=True)]

    def commit(self, sequence: Sequence, end: int) -> None:
        """Notes that the tokens up to `end` have their KV, or will have by the time that later work reads it."""
        row = sequence.row
        was_full, is_full = sequence.num_computed // self.block_size, end // self.block_size
        sequence.num_computed = end
        if was_full == is_full:
            return
        self.publish(sequence)
        if self.offload is None:
            return
        self._note_residency(row, int(self.residency.first[row]), end)
        if self._lacks_tail(sequence):
            self._promise_tail(row)
        self._limit_residency()

    def _limit_residency(self) -> None:
        if self._max_resident_blocks is not None:
            self._drop(self.num_resident - self._max_resident_blocks)

    def release(self, sequence: Sequence, *, leave_copies: bool = False) -> None:
        """Gives back the row and every block of an admitted sequence.

        leave_copies: let the next sequence with the same beginning find the full blocks on the GPU. Not after a step
        that failed, since nobody knows what it wrote.
        """
        row = sequence.row
        assert row is not None, "only an admitted sequence holds blocks"
        if leave_copies:
            self._leave_copies(row)
        on_gpu, on_host = _present(self.gpu_table[row]), _present(self.host_table[row])
        if self.offload is not None:
            self.offload.release_gpu(on_gpu[::-1])  # a row keeps its newest blocks: the oldest are evicted first
            self.offload.release_host(on_host)
        else:
            assert not on_host, "resident mode holds no host blocks"
            self._copies.poison(self.gpu_blocks.release(on_gpu))
        self.gpu_table[row] = NO_BLOCK
        self.host_table[row] = NO_BLOCK
        self._num_given_back += len(on_gpu) + len(on_host) + sequence.num_reserved_host
        self._num_reserved_host -= sequence.num_reserved_host
        sequence.num_reserved_host = 0
        self._num_reserved_splits -= self._num_blocks(sequence.max_num_tokens)
        sequence.row = None
        self._rows_without_tail.discard(row)
        self.residency.clear(row)
        self._free_rows.append(row)

    # Preemption: the KV moves to plain host memory and comes back unchanged

    def save(self, sequence: Sequence) -> None:
        """Copies the computed KV of a resident sequence to the host and gives back its row and blocks.

        Raises:
            MemoryError: the host has no room for it; nothing changes.
        """
        assert self.offload is None, "offload mode promises every block at admission and never preempts"
        blocks = self.gpu_table[sequence.row, : self._num_blocks(sequence.num_computed)].tolist()
        sequence.saved = self._copies.save(blocks)
        sequence.num_published = 0
        self.release(sequence)

    def _admit_saved(self, sequence: Sequence) -> bool:
        assert sequence.saved is not None
        num_saved = sequence.saved.num_blocks
        if self.offload is not None:
            num_full = sequence.num_computed // self.block_size
            needed, num_blocks = sequence.max_num_tokens // self.block_size, self._num_blocks(sequence.num_tokens)
            if self.num_obtainable < 1 or needed > self._num_unpromised_host or not self._keeps_throughput(num_blocks):
                return False
            row = self._take_row(sequence)
            self._reserve_host(sequence, sequence.max_num_tokens // self.block_size - num_full)
            host_blocks = self._take_host(num_full)
            self.host_table[row, :num_full] = host_blocks
            self._note_residency(row, first=num_full, num_computed=sequence.num_computed)
            if num_saved > num_full:
                self.gpu_table[row, num_full] = self._take_gpu(1)[0]
            else:
                self._promise_tail(row)
            self.offload.restore(sequence.saved, host_blocks)
        else:
            # One block to spare for each running row, or the sequence would be preempted again at once.
            num_running = len(self.gpu_table) - len(self._free_rows)
            missing = self._num_blocks(sequence.num_tokens)
            if missing + num_running > self.gpu_blocks.num_free:
                return False
            row, num_full = self._take_row(sequence), 0
            self.gpu_table[row, :missing] = self.gpu_blocks.allocate(missing)
        self._copies.restore(sequence.saved, num_full, self.gpu_table[row, num_full:num_saved].tolist())
        return True

    # The switch

    def switch_to_offload(self, offload: OffloadEngine, sequences: list[Sequence]) -> None:
        """Moves every full block of the running sequences to the host.

        Raises:
            ValueError: the host pool cannot hold what the sequences can grow to; nothing changes.
            PinError: the host pool cannot be used; nothing changes.
        """
        assert self.offload is None
        self.check_offload(offload, sequences)
        full = {sequence.row: sequence.num_computed // self.block_size for sequence in sequences}
        pairs = self._pairs_to_store(offload, full)
        try:
            offload.store(pairs)
        except BaseException:
            offload.drain()
            offload.host.blocks.release(host_block for _, host_block in pairs)
            raise
        host_blocks = dict(pairs)
        for row, count in full.items():
            self.host_table[row, :count] = [host_blocks[block] for block in self.gpu_table[row, :count].tolist()]
        self.offload = offload  # from here on every full block lies on the host
        for row in full:
            for block in _present(self.host_table[row]):
                offload.host.blocks.share(block)
        offload.host.blocks.release(host_blocks.values())
        self._refusal = None
        for sequence in sequences:
            row = sequence.row
            self._reserve_host(sequence, sequence.max_num_tokens // self.block_size - full[row])
            self._note_residency(row, first=0, num_computed=sequence.num_computed)
            self.table_versions[row] += 1
            sequence.num_published = 0
        for sequence in sequences:
            if self._lacks_tail(sequence):
                self._promise_tail(sequence.row)
            self.publish(sequence)
        self._limit_residency()

    def check_offload(self, offload: OffloadEngine, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_offload` would raise, without changing anything or waiting for copies."""
        offload.host.check()  # with nothing to store, only the first step would notice, and fail
        needed = sum(sequence.max_num_tokens // self.block_size for sequence in sequences)
        self._check_room("offload", "can grow to", needed, "host", offload.host.blocks)

    def _pairs_to_store(self, offload: OffloadEngine, full: dict[int, int]) -> list[tuple[int, int]]:
        """Allocate a host block for each of the first `full[row]` blocks of each row; a shared block gets one.

        Return (GPU block, host block) pairs. The oldest blocks come first, a stretch of each row in turn: they are
        dropped first, and whoever drops them waits for their copies.
        """
        longest = max(full.values(), default=0)
        stretches = [
            self.gpu_table[row, begin : min(begin + STORE_GROUP, count)].tolist()
            for begin in range(0, longest, STORE_GROUP)
            for row, count in full.items()
        ]
        gpu_blocks = list(dict.fromkeys(block for stretch in stretches for block in stretch))
        return list(zip(gpu_blocks, self._allocate_host(offload, len(gpu_blocks)), strict=True))

    def _check_room(self, mode: str, what: str, needed: int, name: str, pool: BlockPool, num_deferred: int = 0) -> None:
        num_free = pool.num_free + num_deferred
        if needed > num_free:
            block_bytes = self.layout.block_bytes
            raise ValueError(
                f"switch to {mode} refused: the running sequences {what} {needed} KV blocks "
                f"({format_gib(needed * block_bytes)} GiB), the {name} pool has {num_free} free "
                f"({format_gib(num_free * block_bytes)} GiB): raise {name.lower()}_memory_limit or wait until some "
                "have ended"
            )

    def switch_to_resident(self, sequences: list[Sequence]) -> None:
        """Brings every host block of the running sequences into the GPU pool.

        Raises:
            ValueError: the GPU pool cannot hold them; nothing changes.
        """
        offload = self.offload
        assert offload is not None
        self.check_resident(sequences)
        offload.drain()
        pairs, tables = [], {}
        for sequence in sequences:
            row, missing = sequence.row, self._missing(sequence)
            tables[row] = self.gpu_table[row].copy()
            tables[row][missing] = self.gpu_blocks.allocate(len(missing))
            on_host = np.flatnonzero(self.host_table[row] != NO_BLOCK)
            if self._window is None:
                on_host = np.intersect1d(on_host, missing, assume_unique=True)
            # else: blocks that came back through the ring lack the layers whose window had moved on
            pairs += zip(tables[row][on_host].tolist(), self.host_table[row, on_host].tolist(), strict=True)
        offload.load(pairs)
        for row, table in tables.items():  # only now do the new blocks have content: either mode may read them
            self.gpu_table[row] = table
            self.table_versions[row] += 1
        self.offload = self._refusal = None
        for sequence in sequences:
            offload.release_host(_present(self.host_table[sequence.row]))
            self.host_table[sequence.row] = NO_BLOCK
            self._num_reserved_host -= sequence.num_reserved_host
            sequence.num_reserved_host = 0
            self.residency.clear(sequence.row)
            sequence.num_published = 0
        self._rows_without_tail.clear()
        offload.drain()
        for sequence in sequences:
            self.publish(sequence)

    def check_resident(self, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_resident` would raise, without changing anything or waiting for copies."""
        needed = sum(len(self._missing(sequence)) for sequence in sequences)
        self._check_room("resident", "still need", needed, "GPU", self.gpu_blocks, self.offload.num_deferred_gpu)

    def _missing(self, sequence: Sequence) -> np.ndarray:
        """The logical blocks of the sequence that do not lie on the GPU, up to its last token."""
        return np.flatnonzero(self.gpu_table[sequence.row, : self._num_blocks(sequence.num_tokens)] == NO_BLOCK)

    # Recovery

    def recover(self, sequences: list[Sequence], offload: OffloadEngine | None, *, keeps_prefixes: bool) -> None:
        """Rebuild rows, tables, pools and promises from what the given admitted sequences hold.

        To be called after an exception at any point, once nothing is in flight. Of the old state it reads only the
        sequences' rows in the tables, their tokens, and which blocks are published. Whatever else was held becomes
        free. It may be interrupted and called again.

        Args:
            sequences: the sequences that go on, none of which took part in a step that failed.
            offload: the engine of offload mode, whichever mode is current.
            keeps_prefixes: whether published blocks are known to have their content; if not, they are forgotten.
        """
        rows = [sequence.row for sequence in sequences]
        others = np.setdiff1d(np.arange(len(self.gpu_table)), rows)
        self.gpu_table[others] = self.host_table[others] = NO_BLOCK
        self._free_rows = others[::-1].tolist()
        self._rows_without_tail = set()
        self._num_reserved_host = self._num_reserved_splits = 0
        self._refusal = None
        for row in others.tolist():
            self.residency.clear(row)
        for sequence in sequences:
            self._recover_row(sequence)
        # GPU copies of host blocks, whose keys are numbers, are not kept: a failed step may have written to some of
        # them.
        self.gpu_blocks.rebuild(_present(self.gpu_table), lambda key: keeps_prefixes and isinstance(key, bytes))
        if offload is not None:
            offload.recover()
            offload.host.blocks.rebuild(_present(self.host_table), lambda key: keeps_prefixes)
        for sequence in sequences:
            sequence.num_published = 0
            self.publish(sequence)
        if self.offload is not None:
            self._drop(-self.gpu_room)
            self._limit_residency()

    def _recover_row(self, sequence: Sequence) -> None:
        """Rebuild a row's promises and residency from its tables and the sequence's number of computed tokens."""
        row, full = sequence.row, sequence.num_computed // self.block_size
        self._num_reserved_splits += self._num_blocks(sequence.max_num_tokens)
        sequence.num_reserved_host = 0
        if self.offload is None:
            self.host_table[row] = NO_BLOCK
            self.residency.clear(row)
            return
        self.host_table[row, full:] = NO_BLOCK
        self._reserve_host(sequence, sequence.max_num_tokens // self.block_size - full)
        missing = np.flatnonzero(self.gpu_table[row, :full] == NO_BLOCK)
        first = int(missing[-1]) + 1 if len(missing) else 0
        self.gpu_table[row, :first] = NO_BLOCK
        self._note_residency(row, first, sequence.num_computed)
        if self._lacks_tail(sequence):
            self._rows_without_tail.add(row)

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks of an admitted sequence whose tokens are known, for equal beginnings to share."""
        if self.prefixes.has_new(sequence):
            table, pool = self._home()
            self.prefixes.publish(sequence, table[sequence.row], pool)

    def _home(self) -> tuple[np.ndarray, BlockPool]:
        """The table and pool in which full blocks lie, and are published, in this mode."""
        if self.offload is not None:
            return self.host_table, self.offload.host.blocks
        return self.gpu_table, self.gpu_blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _present(row: np.ndarray) -> list[int]:
    return row[row != NO_BLOCK].tolist()
