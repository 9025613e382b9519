"""Move blocks between GPU and host: for a sequence that gives way or comes back, and for the switch of the mode."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nanoinfer.common.units import format_size
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.tables import present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK
from offload import BlockPool, OffloadEngine
from offload.blocks import GPU, HOST, KEPT

# Blocks that go to the host in one operation, so that a wait for a few blocks does not wait for the whole pool.
STORE_GROUP = 64


class BlockCopier(Protocol):
    """Copies whole blocks, given as pairs of numbers, and what rows keep besides blocks, between two steps."""

    def reserve(self, num_blocks: int) -> None:
        """Make room for `num_blocks` pageable blocks in all. Raise MemoryError if there is none."""

    def trim(self) -> None:
        """Give the memory of all pageable blocks back, and forget all that rows kept."""

    def copy(self, source: str, destination: str, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks between two pools (`GPU`, `HOST`, `KEPT`): (block of `source`, block of `destination`). Wait."""

    def keep_row(self, row: int, sequence_id: int) -> None:
        """Copy what a row has besides blocks to the host, right behind the `copy` of its blocks, which waits."""

    def bring_row_back(self, row: int, sequence_id: int) -> None:
        """Copy what `keep_row` has kept of a sequence to its new row. Wait before."""

    def forget_row(self, sequence_id: int) -> None:
        """Forget what `keep_row` has kept of a sequence."""

    def forget_other_rows(self, sequence_ids: set[int]) -> None:
        """Forget what `keep_row` has kept of any other sequence."""


class Mover:
    """Moves the blocks of sequences.

    Args:
        offload: copies between the GPU pool and the host pool.

    Attributes:
        kept: who holds which pageable block, in which the KV of sequences that gave way lies. A block that sequences
            shared is kept once, and shared again wherever its content lies when they come back.
    """

    def __init__(self, cache: KVCache, copier: BlockCopier, offload: OffloadEngine, block_bytes: int) -> None:
        self.kept = BlockPool(0)
        self._cache, self._tables, self._copies = cache, cache.tables, cache.copies
        self._copier, self._offload, self._block_bytes = copier, offload, block_bytes

    # Giving way and coming back

    def give_way(self, sequence: Sequence) -> None:
        """Copy the computed KV of a resident sequence to the host and give back its row and blocks.

        Full blocks that are kept already, for whoever shared them, are not copied again.

        Raises:
            MemoryError: the host has no room for it; nothing changes.
        """
        tables, pool = self._tables, self.kept
        assert not tables.is_offload, "offload mode promises every block at admission, so nobody has to give way"
        blocks = tables.gpu[sequence.row, : tables.num_blocks(sequence.num_computed)].tolist()
        contents = self._cache.prefixes.contents(sequence)
        kept = [pool.lookup(content) for content in contents]
        kept += [None] * (len(blocks) - len(kept))  # nobody else has these
        missing = [place for place, block in enumerate(kept) if block is None]
        if (num_short := len(missing) - pool.num_free) > 0:
            try:
                self._copier.reserve(pool.num_blocks + num_short)
            except MemoryError:
                pool.release(block for block in kept if block is not None)
                raise
            pool.grow(num_short)
        for place, block in zip(missing, pool.allocate(len(missing)), strict=True):
            kept[place] = block
        self._copier.copy(GPU, KEPT, [(blocks[place], kept[place]) for place in missing])
        self._copier.keep_row(sequence.row, sequence.sequence_id)
        for block, content in zip(kept, contents, strict=False):
            pool.publish(block, content)
        sequence.kept_blocks = kept
        self._cache.release(sequence)

    def _num_full(self, sequence: Sequence) -> int:
        return sequence.num_computed // self._tables.block_size

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many GPU blocks a sequence that gave way needs to come back in resident mode."""
        num_there = sum(self._equal_to(block) is not None for block in sequence.kept_blocks)
        return self._tables.num_blocks(sequence.num_tokens) - num_there

    def _equal_to(self, kept: int) -> int | None:
        """Return the block of the home tier with the content of a kept block that some sequence holds, or None."""
        content, (_, pool) = self.kept.key(kept), self._tables.home
        block = None if content is None else pool.published(content)
        return block if block is not None and pool.references(block) else None

    def bring_back(self, sequence: Sequence) -> None:
        """Copy the KV of a sequence that gave way into blocks for its new row. `forget` the kept blocks afterwards.

        In offload mode full blocks go to the host pool, and what was promised for them is used up.
        """
        cache, tables, row, kept = self._cache, self._tables, sequence.row, sequence.kept_blocks
        num_full, (home, pool) = self._num_full(sequence), tables.home
        num_wanted = num_full if tables.is_offload else tables.num_blocks(sequence.num_tokens)
        self._copier.bring_row_back(row, sequence.sequence_id)
        table = [self._equal_to(block) for block in kept[:num_full]]
        for block in table:
            if block is not None:
                pool.hold(block)
        table += [None] * (num_wanted - num_full)
        missing = [place for place, block in enumerate(table) if block is None]
        taken = cache.take_host(len(missing)) if tables.is_offload else pool.allocate(len(missing))
        for place, block in zip(missing, taken, strict=True):
            table[place] = block
        home[row, :num_wanted] = table
        if tables.is_offload:
            self._copies.note(row, first=num_full, num_computed=sequence.num_computed)
            if len(kept) > num_full:
                tables.gpu[row, num_full] = self._copies.take(1)[0]
                self._copier.copy(KEPT, GPU, [(kept[num_full], int(tables.gpu[row, num_full]))])
            else:
                self._copies.promise_tail(row)
        pairs = [(kept[place], table[place]) for place in missing if place < len(kept)]
        self._copier.copy(KEPT, HOST if tables.is_offload else GPU, pairs)

    def forget(self, sequence: Sequence) -> None:
        """Give back what is kept of a sequence, if anything."""
        blocks, sequence.kept_blocks = sequence.kept_blocks, None
        if blocks is not None:
            self.kept.release(blocks)
            self._copier.forget_row(sequence.sequence_id)
            self._trim()

    def _trim(self, *, is_certain: bool = True) -> None:
        """Give the memory back if nothing is kept.

        is_certain: whether the pool's numbers say how much memory there is; they may not after an exception.
        """
        if not self.kept.num_used and (self.kept.num_blocks or not is_certain):
            self.kept = BlockPool(0)
            self._copier.trim()

    # The switch

    def switch_to_offload(self, sequences: list[Sequence]) -> None:
        """Move every full block of the running sequences to the host.

        Raises:
            ValueError: the host pool cannot hold what the sequences can grow to; nothing changes.
            PinError, MemoryError: the host pool cannot be used; nothing changes.
        """
        assert not self._tables.is_offload
        lifetimes = self._tables.lifetimes
        self.check_offload(sequences)
        full = {sequence.row: self._num_full(sequence) for sequence in sequences}
        pairs = self._pairs_to_store(full)
        try:
            for begin in range(0, len(pairs), STORE_GROUP):
                group = pairs[begin : begin + STORE_GROUP]
                self._offload.store(group, lifetimes.begin([gpu_block for gpu_block, _ in group]))
        except BaseException:
            self._offload.drain()
            self._offload.recover(lifetimes.operation)
            lifetimes.host_blocks.release(host_block for _, host_block in pairs)
            raise
        host_blocks = dict(pairs)
        for row, count in full.items():
            self._tables.host[row, :count] = [host_blocks[block] for block in self._tables.gpu[row, :count].tolist()]
        # From here on every full block lies on the host.
        self._tables.is_offload, self._tables.home = True, (self._tables.host, lifetimes.host_blocks)
        for row in full:
            for block in present(self._tables.host[row]):
                lifetimes.host_blocks.hold(block)
        lifetimes.host_blocks.release(host_blocks.values())
        for sequence in sequences:
            row = sequence.row
            self._cache.reserve_host(sequence, sequence.max_num_tokens // self._tables.block_size - full[row])
            self._copies.note(row, first=0, num_computed=sequence.num_computed)
            self._tables.versions[row] += 1
        for sequence in sequences:
            if self._copies.lacks_tail(sequence):
                self._copies.promise_tail(sequence.row)
            self._cache.prefixes.publish_again(sequence)
        self._copies.limit()

    def check_offload(self, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_offload` would raise, without changing anything or waiting for copies."""
        room = self._cache.host_room
        room.require(1)
        room.wait_for(self.num_host_blocks(sequences))
        self.check_host_room(sequences)

    def check_host_room(self, sequences: list[Sequence]) -> None:
        """Raise ValueError if the running sequences can grow to more blocks than the host has, or may have one day."""
        room, blocks = self._cache.host_room, self._tables.lifetimes.host_blocks
        num_free = room.num_possible - blocks.num_used
        because = None if room.failure is None else str(room.failure)
        self._check_room("offload", "can grow to", self.num_host_blocks(sequences), "host", num_free, because)

    def num_host_blocks(self, running: list[Sequence]) -> int:
        """Return how many host blocks the running sequences can fill, which all are resident; a shared block is one."""
        num_filled = sum(sequence.max_num_tokens // self._tables.block_size for sequence in running)
        return num_filled - self._tables.gpu_blocks.num_shared

    def _pairs_to_store(self, full: dict[int, int]) -> list[tuple[int, int]]:
        """Allocate a host block for each of the first `full[row]` blocks of each row; a shared block gets one.

        Return (GPU block, host block) pairs. The oldest blocks come first, a stretch of each row in turn: they are
        dropped first, and whoever drops them waits for their copies.
        """
        longest = max(full.values(), default=0)
        stretches = [
            self._tables.gpu[row, begin : min(begin + STORE_GROUP, count)].tolist()
            for begin in range(0, longest, STORE_GROUP)
            for row, count in full.items()
        ]
        gpu_blocks = list(dict.fromkeys(block for stretch in stretches for block in stretch))
        return list(zip(gpu_blocks, self._cache.take_host(len(gpu_blocks)), strict=True))

    def _check_room(
        self, mode: str, what: str, needed: int, name: str, num_free: int, because: str | None = None
    ) -> None:
        if needed > num_free:
            block_bytes = self._block_bytes
            raise ValueError(
                f"switch to {mode} refused: the running sequences {what} a KV cache of "
                f"{format_size(needed * block_bytes)}, the {name} has {format_size(num_free * block_bytes)} free for "
                f"it{'' if because is None else f' ({because})'}: raise {name.lower()}_memory_limit or wait until some "
                "have ended"
            )

    def switch_to_resident(self, sequences: list[Sequence]) -> None:
        """Bring every host block of the running sequences into the GPU pool.

        Raises:
            ValueError: the GPU pool cannot hold them; nothing changes.
        """
        assert self._tables.is_offload
        self.check_resident(sequences)
        self._drain()
        there, tables = self._gpu_copies(sequences), {}
        copies = dict(there)
        for sequence in sequences:
            row = sequence.row
            tables[row] = self._tables.gpu[row].copy()
            for place in self._missing(sequence).tolist():
                host_block = int(self._tables.host[row, place])
                if host_block in copies:
                    self._tables.gpu_blocks.hold(copies[host_block])
                    tables[row][place] = copies[host_block]
                else:
                    tables[row][place] = self._tables.gpu_blocks.allocate(1)[0]
                    if host_block != NO_BLOCK:
                        copies[host_block] = int(tables[row][place])
        pairs = [(copy, block) for block, copy in copies.items() if block not in there]
        if self._copies.window is not None:  # blocks that came back through the ring lack layers: all are loaded again
            for row, table in tables.items():
                on_host = np.flatnonzero(self._tables.host[row] != NO_BLOCK)
                pairs += zip(table[on_host].tolist(), self._tables.host[row, on_host].tolist(), strict=True)
        self._offload.load(list(dict.fromkeys(pairs)))
        for row, table in tables.items():  # only now do the new blocks have content: either mode may read them
            self._tables.gpu[row] = table
            self._tables.versions[row] += 1
        self._tables.is_offload, self._tables.home = False, (self._tables.gpu, self._tables.gpu_blocks)
        for sequence in sequences:
            self._tables.lifetimes.release_host(present(self._tables.host[sequence.row]))
            self._tables.host[sequence.row] = NO_BLOCK
            self._cache.cancel_reserved(sequence)
            self._copies.residency.clear(sequence.row)
        self._tables.rows_without_tail.clear()
        self._drain()
        for sequence in sequences:
            self._cache.prefixes.publish_again(sequence)

    def _drain(self) -> None:
        """Wait until no copy is in flight, and reclaim every released block."""
        self._offload.drain()
        self._tables.lifetimes.reclaim()

    def check_resident(self, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_resident` would raise, without changing anything or waiting for copies."""
        missing = [self._tables.host[sequence.row, self._missing(sequence)] for sequence in sequences]
        on_host = {block for blocks in missing for block in present(blocks)}
        needed = len(on_host - self._gpu_copies(sequences).keys()) + sum(int((b == NO_BLOCK).sum()) for b in missing)
        num_free = self._tables.gpu_blocks.num_free + self._tables.lifetimes.num_deferred_gpu
        self._check_room("resident", "still need", needed, "GPU", num_free)

    def _gpu_copies(self, sequences: list[Sequence]) -> dict[int, int]:
        """Return a GPU copy of each host block of the sequences that has one, by host block."""
        rows = [sequence.row for sequence in sequences]
        gpu, host = self._tables.gpu[rows], self._tables.host[rows]
        is_copy = (gpu != NO_BLOCK) & (host != NO_BLOCK)
        return dict(zip(host[is_copy].tolist(), gpu[is_copy].tolist(), strict=True))

    def _missing(self, sequence: Sequence) -> np.ndarray:
        """Return the logical blocks of the sequence that do not lie on the GPU, up to its last token."""
        on_gpu = self._tables.gpu[sequence.row, : self._tables.num_blocks(sequence.num_tokens)]
        return np.flatnonzero(on_gpu == NO_BLOCK)

    # Recovery

    def recover(self, running: list[Sequence], others: list[Sequence], *, keeps_prefixes: bool) -> None:
        """Rebuild rows, tables, pools and promises from what the given admitted sequences hold.

        To be called after an exception at any point, once nothing is in flight. Of the old state it reads only the
        sequences' rows in the tables, their tokens, and which blocks are published. Whatever else was held becomes
        free. It may be interrupted and called again.

        Args:
            running: the sequences that go on, none of which took part in a step that failed.
            others: those that wait, some of which may have given way before, and those that have ended.
            keeps_prefixes: whether published blocks are known to have their content; if not, they are forgotten.
        """
        for sequence in others:
            if sequence.is_finished:
                sequence.kept_blocks = None
        gave_way = [sequence for sequence in others if sequence.kept_blocks is not None]
        self.kept.rebuild(block for sequence in gave_way for block in sequence.kept_blocks)
        self._copier.forget_other_rows({sequence.sequence_id for sequence in gave_way})
        self._trim(is_certain=False)
        self._cache.recover(running, others)  # a sequence that waits may have been being admitted
        for sequence in running:
            self._recover_row(sequence)
        # GPU copies of host blocks are not known: a failed step may have written to some of them.
        tables, lifetimes = self._tables, self._tables.lifetimes
        tables.gpu_blocks.rebuild(present(tables.gpu), lambda content: keeps_prefixes and not tables.is_offload)
        lifetimes.recover()
        self._offload.recover(lifetimes.operation)
        lifetimes.host_blocks.rebuild(present(tables.host), lambda key: keeps_prefixes)
        for sequence in running:
            self._cache.prefixes.publish_again(sequence)
        self._copies.drop(-self._copies.gpu_room)
        self._copies.limit()

    def _recover_row(self, sequence: Sequence) -> None:
        """Rebuild a row's promises and residency from its tables and the sequence's number of computed tokens."""
        row, full = sequence.row, self._num_full(sequence)
        if not self._tables.is_offload:
            self._tables.host[row] = NO_BLOCK
            self._copies.residency.clear(row)
            return
        self._tables.host[row, full:] = NO_BLOCK
        self._cache.reserve_host(sequence, sequence.max_num_tokens // self._tables.block_size - full)
        missing = np.flatnonzero(self._tables.gpu[row, :full] == NO_BLOCK)
        first = int(missing[-1]) + 1 if len(missing) else 0
        self._tables.gpu[row, :first] = NO_BLOCK
        self._copies.note(row, first, sequence.num_computed)
        if self._copies.lacks_tail(sequence):
            self._tables.rows_without_tail.add(row)
