"""The switch of the mode moves all full blocks of the running sequences to the other tier."""

from __future__ import annotations

import warnings

from nanoinfer.common.units import format_size
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.mover import Mover
from nanoinfer.kv.tables import present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.executor import Executor
from nanoinfer.step.plan import NO_BLOCK

# Blocks that go to the host in one operation, so that a wait for a few blocks does not wait for the whole pool.
STORE_GROUP = 64


class Switch:
    """Enters either mode.

    Args:
        executor: copies between the GPU pool and the host pool.
    """

    def __init__(self, cache: KVCache, mover: Mover, executor: Executor) -> None:
        self._cache, self._tables, self._copies, self._mover = cache, cache.tables, cache.copies, mover
        self._executor, self._block_bytes, self._was_told = executor, executor.layout.block_bytes, False
        self._blocks = cache.tables.lifetimes.host_blocks

    def switch_to_offload(self, sequences: list[Sequence]) -> None:
        """Move every full block of the running sequences to the host.

        Raises:
            ValueError: the host pool cannot hold what the sequences can grow to; nothing changes.
            PinError, MemoryError: the host pool cannot be used; nothing changes.
        """
        assert not self._tables.is_offload
        lifetimes = self._tables.lifetimes
        self._mover.transfers.finish()
        self.check_offload(sequences)
        tables, full = self._tables, {}
        for sequence in sequences:
            full |= {(number, sequence.row): blocks for number, blocks in enumerate(tables.full(sequence))}
        host_blocks, pairs = self._host_blocks_for(full)
        try:
            for begin in range(0, len(pairs), STORE_GROUP):
                group = pairs[begin : begin + STORE_GROUP]
                self._executor.store(group, lifetimes.begin([gpu_block for gpu_block, _ in group]))
        except BaseException:
            self._executor.drain()
            self._executor.recover(lifetimes.operation)
            lifetimes.host_blocks.release(host_blocks.values())
            raise
        for line, blocks in full.items():
            at = (*line, slice(blocks.start, blocks.stop))
            tables.host[at] = [host_blocks[block] for block in tables.gpu[at].tolist()]
        # From here on every full block lies on the host.
        self._tables.is_offload, self._tables.home = True, (self._tables.host, lifetimes.host_blocks)
        self._tables.owners.clear()
        for line in full:
            for block in present(tables.host[line]):
                lifetimes.host_blocks.hold(block)
        lifetimes.host_blocks.release(host_blocks.values())
        for sequence in sequences:
            self._cache.promise_host(sequence)
            self._copies.set_resident_from(sequence, [0] * len(tables.groups))
            tables.gpu_versions[sequence.row] += 1
        for sequence in sequences:
            self._copies.promise_tails(sequence)
            self._cache.prefixes.publish_again(sequence)
        self._copies.drop_above_limit()

    def check_offload(self, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_offload` would raise, without changing anything or waiting for copies."""
        self._blocks.require(1)
        self._blocks.wait_for(self._mover.num_host_blocks(sequences))
        self.check_host_room(sequences)

    def check_host_room(self, sequences: list[Sequence]) -> None:
        """Raise ValueError if the running sequences can grow to more blocks than the host has, or may have one day."""
        blocks = self._blocks
        num_free = blocks.num_possible - blocks.num_used
        because = None if blocks.failure is None else str(blocks.failure)
        self._check_room("offload", "can grow to", self._mover.num_host_blocks(sequences), "host", num_free, because)

    def _host_blocks_for(self, full: dict[tuple[int, int], range]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Take up a host block for each full block of each group and row; a shared block gets one.

        Return them by GPU block, and (GPU block, host block) pairs of those whose content is not there yet. The oldest
        blocks come first, a stretch of each row in turn: they are dropped first, and whoever drops them waits for their
        copies.
        """
        longest = max(map(len, full.values()), default=0)
        parts = (
            (*line, slice(part.start, part.stop))
            for begin in range(0, longest, STORE_GROUP)
            for line, blocks in full.items()
            if (part := blocks[begin : begin + STORE_GROUP])
        )
        stretches = [self._tables.gpu[part].tolist() for part in parts]
        key, found = self._tables.gpu_blocks.key, {}
        for block in dict.fromkeys(block for stretch in stretches for block in stretch):
            found[block] = None if key(block) is None else self._blocks.lookup(key(block))
        missing = [block for block, on_host in found.items() if on_host is None]
        pairs = list(zip(missing, self._cache.take_host(len(missing)), strict=True))
        return found | dict(pairs), pairs

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
        self._mover.transfers.finish()
        self.check_resident(sequences)
        self._drain()
        there, tables, own = self._gpu_copies(sequences), self._tables, {}
        copies = dict(there)
        for sequence in sequences:
            row = sequence.row
            own[row] = tables.gpu[:, row].copy()
            for number, place in self._missing(sequence):
                host_block = int(tables.host[number, row, place])
                if host_block in copies:
                    tables.gpu_blocks.hold(copies[host_block])
                    own[row][number, place] = copies[host_block]
                else:
                    own[row][number, place] = tables.gpu_blocks.allocate(1)[0]
                    if host_block != NO_BLOCK:
                        copies[host_block] = int(own[row][number, place])
        pairs = [(copy, block) for block, copy in copies.items() if block not in there]
        self._executor.load(pairs, tables.lifetimes.begin())
        for row, table in own.items():  # only now do the new blocks have content: either mode may read them
            tables.gpu[:, row] = table
            tables.gpu_versions[row] += 1
        tables.is_offload, tables.home = False, (tables.gpu, tables.gpu_blocks)
        tables.owners.clear()
        tables.promised[:] = 0
        for sequence in sequences:
            tables.lifetimes.release_host(present(tables.host[:, sequence.row]))
            tables.host[:, sequence.row] = NO_BLOCK
            self._cache.cancel_promise(sequence)
            self._copies.clear(sequence.row)
            self._cache.promise_windows(sequence)
        self._drain()
        for sequence in sequences:
            self._cache.prefixes.publish_again(sequence)

    def _drain(self) -> None:
        """Wait until no copy is in flight, and reclaim every released block."""
        self._executor.drain()
        self._tables.lifetimes.reclaim()

    def check_resident(self, sequences: list[Sequence]) -> None:
        """Raise what `switch_to_resident` would raise, without changing anything or waiting for copies."""
        tables, rows = self._tables, [sequence.row for sequence in sequences]
        places = [(number, one.row, place) for one in sequences for number, place in self._missing(one)]
        missing = [int(tables.host[at]) for at in places if at[0] not in tables.windowed]
        on_host = {block for block in missing if block != NO_BLOCK}
        needed = len(on_host - self._gpu_copies(sequences).keys()) + missing.count(NO_BLOCK)
        for number in tables.windowed:  # what they share now, each may leave behind while others go on to hold it
            group, begins = tables.groups[number], tables.begins[number, rows].tolist()
            needed -= len(set(present(tables.gpu[number, rows])))
            for one, begin in zip(sequences, begins, strict=True):
                needed += max(group.most_blocks(one.max_num_tokens), -(-one.num_tokens // group.block_size) - begin)
        num_free = self._tables.gpu_blocks.num_free + self._tables.lifetimes.num_deferred_gpu
        self._check_room("resident", "still need", needed, "GPU", num_free)

    def _gpu_copies(self, sequences: list[Sequence]) -> dict[int, int]:
        """Return a GPU copy of each host block of the sequences that has one, by host block."""
        rows = [sequence.row for sequence in sequences]
        gpu, host = self._tables.gpu[:, rows], self._tables.host[:, rows]
        is_copy = (gpu != NO_BLOCK) & (host != NO_BLOCK)
        return dict(zip(host[is_copy].tolist(), gpu[is_copy].tolist(), strict=True))

    def _missing(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Return (group, logical block) of what does not lie on the GPU and a later token sees, up to the last one."""
        tables, row = self._tables, sequence.row
        return [
            (number, place)
            for number, group in enumerate(tables.groups)
            for place in range(int(tables.begins[number, row]), -(-sequence.num_tokens // group.block_size))
            if tables.gpu[number, row, place] == NO_BLOCK
        ]

    def tell(self) -> None:
        """Warn, once, if offload mode has to do with less host memory than was planned."""
        blocks = self._blocks
        if blocks.failure is None or self._was_told:
            return
        self._was_told = True
        usable, planned = (format_size(n * self._block_bytes) for n in (blocks.num_blocks, blocks.num_planned))
        warnings.warn(
            f"the KV pool on the host has {usable} instead of {planned}, so fewer requests run at a time: "
            f"{blocks.failure}",
            stacklevel=2,
        )
