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

import numpy as np

from nanoinfer.kv.gpu_copies import GPUCopies
from nanoinfer.kv.prefix_cache import PrefixCache
from nanoinfer.kv.tables import BlockTables, present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK


class KVCache:
    """Rows and blocks of the admitted sequences: what they hold, are promised, and fill.

    `Admission` lets sequences in, `Mover` moves their blocks between GPU and host.

    Args:
        tables: where the blocks lie.
        copies: which full blocks have a copy on the GPU.

    Attributes:
        free_rows: rows without a sequence.
        num_reserved_host: host blocks that are promised and not handed out yet.
        num_reserved_splits: blocks that all rows together can ever attend to.
    """

    def __init__(self, tables: BlockTables, copies: GPUCopies, *, enable_prefix_caching: bool) -> None:
        self.tables, self.copies = tables, copies
        self.prefixes = PrefixCache(tables, enable_prefix_caching)
        self.free_rows = list(range(len(tables.gpu) - 1, -1, -1))
        self.num_reserved_host = self.num_reserved_splits = 0

    @property
    def num_unpromised_host(self) -> int:
        """Number of host blocks that are free, or will be once copies have run, and promised to no sequence."""
        lifetimes = self.tables.lifetimes
        return lifetimes.host_blocks.num_free + lifetimes.num_deferred_host - self.num_reserved_host

    def reserve_host(self, sequence: Sequence, count: int) -> None:
        """Promise the sequence `count` host blocks."""
        sequence.num_reserved_host = count
        self.num_reserved_host += count

    def cancel_reserved(self, sequence: Sequence) -> None:
        """Take back the promise of what the sequence has not filled."""
        self.num_reserved_host -= sequence.num_reserved_host
        sequence.num_reserved_host = 0

    def take_row(self, sequence: Sequence) -> int:
        sequence.row = self.free_rows.pop()
        self.tables.versions[sequence.row] += 1
        self.num_reserved_splits += self.tables.num_blocks(sequence.max_num_tokens)
        return sequence.row

    def begin(self, sequence: Sequence, num_hits: int) -> None:
        """Note that the KV of an admitted sequence begins with `num_hits` published blocks."""
        sequence.num_computed = sequence.num_cached = num_hits * self.tables.block_size
        self.prefixes.begin(sequence, num_hits)

    def take_host(self, count: int) -> list[int]:
        """Hand out host blocks; wait for copies, if need be."""
        self.tables.lifetimes.wait_for_host(count)
        return self.tables.lifetimes.host_blocks.allocate(count)

    def max_chunk(self, sequence: Sequence, wanted: int) -> int:
        """Return for how many of the next `wanted` tokens the admitted sequence has, or can get, GPU blocks now."""
        row = sequence.row
        first, tokens_in_tail = divmod(sequence.num_computed, self.tables.block_size)
        held = int((self.tables.gpu[row, first:] != NO_BLOCK).sum()) + (row in self.tables.rows_without_tail)
        return min(wanted, (held + max(0, self.copies.num_obtainable)) * self.tables.block_size - tokens_in_tail)

    def without_slot(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the admitted sequences whose last token begins a block that they do not have yet; usually few."""
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        last = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64) - 1
        lacking = self.tables.gpu[rows, last // self.tables.block_size] == NO_BLOCK
        return [sequences[i] for i in np.flatnonzero(lacking)]

    def grow(self, sequence: Sequence, end: int) -> None:
        """Make sure that the tokens from `num_computed` to `end` have GPU blocks to be written to.

        Raises:
            MemoryError: too few free blocks; ask `max_chunk` before.
        """
        row = sequence.row
        first = sequence.num_computed // self.tables.block_size
        missing = first + np.flatnonzero(self.tables.gpu[row, first : self.tables.num_blocks(end)] == NO_BLOCK)
        if len(missing) == 0:
            return
        self.tables.rows_without_tail.discard(row)
        self.tables.gpu[row, missing] = self.copies.take(len(missing))
        self.tables.versions[row] += 1

    def take_promised(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """Take a promised host block for each block that becomes full when `end` tokens are computed.

        Returns:
            (GPU block, host block) pairs to write through; empty where nothing is promised, as in resident mode.
        """
        row = sequence.row
        full = range(sequence.num_computed // self.tables.block_size, end // self.tables.block_size)
        if not full or not sequence.num_reserved_host:
            return []
        host_blocks = self.take_host(len(full))
        sequence.num_reserved_host -= len(full)
        self.num_reserved_host -= len(full)
        self.tables.host[row, full.start : full.stop] = host_blocks
        return [(int(self.tables.gpu[row, s]), block) for s, block in zip(full, host_blocks, strict=True)]

    def commit(self, sequence: Sequence, end: int) -> None:
        """Note that the tokens up to `end` have their KV, or will have by the time that later work reads it."""
        row = sequence.row
        was_full, is_full = sequence.num_computed // self.tables.block_size, end // self.tables.block_size
        sequence.num_computed = end
        if was_full == is_full:
            return
        self.prefixes.publish(sequence)
        if self.tables.host[row, was_full] == NO_BLOCK:
            return  # the GPU's block is the only one, so it is no copy that can be dropped
        self.copies.note(row, int(self.copies.residency.first[row]), end)
        if self.copies.lacks_tail(sequence):
            self.copies.promise_tail(row)
        self.copies.limit()

    def release(self, sequence: Sequence, *, leave_copies: bool = False) -> None:
        """Give back the row and every block of an admitted sequence.

        leave_copies: let the next sequence with the same beginning find the full blocks on the GPU. Not after a step
        that failed, since nobody knows what it wrote.
        """
        row = sequence.row
        assert row is not None, "only an admitted sequence holds blocks"
        if leave_copies:
            self.copies.leave(row)
        on_gpu, on_host = present(self.tables.gpu[row]), present(self.tables.host[row])
        # Of copies a row keeps the newest, so the oldest are evicted first. Of a beginning the last is evicted first.
        self.tables.lifetimes.release_gpu(on_gpu[::-1] if on_host else on_gpu)
        self.tables.lifetimes.release_host(on_host)
        self.tables.gpu[row] = NO_BLOCK
        self.tables.host[row] = NO_BLOCK
        self.tables.versions[row] += 1
        self.cancel_reserved(sequence)
        self.num_reserved_splits -= self.tables.num_blocks(sequence.max_num_tokens)
        sequence.row = None
        self.tables.rows_without_tail.discard(row)
        self.copies.residency.clear(row)
        self.free_rows.append(row)

    def recover(self, running: list[Sequence], others: list[Sequence]) -> None:
        """Empty every row but those of the `running` sequences, and forget all promises: the numbers may contradict.

        others: sequences that wait or have ended. What has no kept blocks is computed anew.
        """
        self.num_reserved_host = 0
        self.num_reserved_splits = sum(self.tables.num_blocks(sequence.max_num_tokens) for sequence in running)
        for sequence in [*running, *others]:
            sequence.num_reserved_host = 0
        for sequence in others:
            sequence.row = None
            if not sequence.is_finished and sequence.kept_blocks is None:
                sequence.num_computed = sequence.num_cached = 0
        free = np.setdiff1d(np.arange(len(self.tables.gpu)), [sequence.row for sequence in running])
        self.tables.gpu[free] = self.tables.host[free] = NO_BLOCK
        self.free_rows = free[::-1].tolist()
        self.tables.rows_without_tail.clear()
        for row in free.tolist():
            self.copies.residency.clear(row)
