"""Sequences give way and come back; and what becomes of all after an exception."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import numpy as np

from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.tables import present
from nanoinfer.kv.transfers import MAX_GROUP, Transfers
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.executor import Executor
from nanoinfer.step.plan import NO_BLOCK

# Cached blocks that are looked at in a step, of which some may be on the host: as many as a long prompt evicts.
MAX_LOOKED_AT = 256


class Mover:
    """Moves the blocks of sequences.

    Args:
        executor: copies blocks and states.
        may_spill: whether memory is taken for what the GPU evicts, too, as it may be wanted anyway; else what is there.

    Attributes:
        transfers: blocks on their way to the host, and from there.
        away: sequences that gave way, whose blocks lie on the host. A block that sequences shared lies there once, and
            is shared again wherever its content lies when they come back.
    """

    def __init__(self, cache: KVCache, executor: Executor, may_spill: bool) -> None:
        self._cache, self._tables, self._copies = cache, cache.tables, cache.copies
        self._executor, self._blocks = executor, cache.tables.lifetimes.host_blocks
        self.transfers, self._may_spill = Transfers(cache.tables, executor), may_spill
        self.away: list[Sequence] = []
        self._awaited: dict[Sequence, set[int]] = {}  # the numbers of the groups that a sequence waits for

    # Giving way and coming back

    def may_give_way(self, sequence: Sequence) -> bool:
        """Whether it is known where the KV of a resident sequence can go; if not, memory is being pinned for it."""
        num_missing = sum(block is None for block in self._on_host(sequence)) + self._num_of_state(sequence)
        self._ask_for(num_missing)
        num_wanted = self._blocks.num_blocks + num_missing - self._blocks.num_free
        return num_missing <= self._blocks.num_free or not self._blocks.is_coming(num_wanted)

    def _ask_for(self, num_blocks: int) -> None:
        """Have so many host blocks pinned that hold nothing; wait for none."""
        try:
            self._executor.open_host_pool(False)  # whose memory is taken as it is wanted then
        except MemoryError:
            return  # there is pageable memory, or none
        self._blocks.wait_for(num_blocks, may_wait=False)

    def _on_host(self, sequence: Sequence) -> list[int | None]:
        """Return for each of its `_places` the host block with the content of a resident sequence's block, or None."""
        return [None if content is None else self._blocks.published(content) for content in self._contents(sequence)]

    def _places(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Return (group, logical block) of each block of a sequence that has KV which a later token sees."""
        num_computed = sequence.num_computed
        return [
            (number, place)
            for number, group in enumerate(self._tables.groups)
            for place in range(group.first_needed(num_computed), -(-num_computed // group.block_size))
        ]

    def _contents(self, sequence: Sequence) -> list[bytes | None]:
        """Return what each of these blocks holds, None where nobody else has it."""
        return [self._cache.prefixes.content(sequence, *place) for place in self._places(sequence)]

    def _num_of_state(self, sequence: Sequence) -> int:
        """Return the host blocks that an admitted sequence's state fills: before its first token it is none."""
        return self._tables.blocks_of_state if sequence.num_computed else 0

    def _is_full(self, sequence: Sequence, number: int, place: int) -> bool:
        return (place + 1) * self._tables.groups[number].block_size <= sequence.num_computed

    def give_way(self, sequence: Sequence) -> None:
        """Have the computed KV of a resident sequence moved to the host, and give back its row and blocks.

        Full blocks that lie there already, for whoever shared them, are not copied again. Where no pinned memory is
        free, the KV goes to pageable memory.

        Raises:
            MemoryError: the host has no room for it; nothing changes.
        """
        tables, pool = self._tables, self._blocks
        assert not tables.is_offload, "offload mode promises every block at admission, so nobody has to give way"
        kept = self._on_host(sequence)
        blocks = [int(tables.gpu[number, sequence.row, place]) for number, place in self._places(sequence)]
        for block in kept:
            if block is not None:
                pool.hold(block)
        missing, num_of_state = (
            [place for place, block in enumerate(kept) if block is None],
            self._num_of_state(sequence),
        )
        num_wanted = len(missing) + num_of_state
        self._ask_for(num_wanted)
        num_short = max(0, num_wanted - pool.num_free)
        try:
            borrowed = self._executor.borrow(num_short) if num_short else []
        except MemoryError:
            pool.release(block for block in kept if block is not None)
            raise
        taken = pool.allocate(num_wanted - num_short) + pool.take_borrowed(borrowed)
        of_state = taken[len(missing) :]
        for place, block in zip(missing, taken, strict=False):
            kept[place] = block
        self.transfers.store([(blocks[place], kept[place]) for place in missing])
        self.transfers.store_state(sequence.state_slot, of_state)
        for block, content in zip(kept, self._contents(sequence), strict=True):
            if content is not None:
                pool.publish(block, content)
        sequence.kept_blocks, sequence.kept_state = kept, of_state
        self.away.append(sequence)
        self._cache.release(sequence)

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many GPU blocks a sequence that gave way needs to come back in resident mode."""
        whole = [number not in self._tables.windowed for number, _ in self._places(sequence)]
        num_there = sum(
            is_whole and self._equal_to(block) is not None
            for is_whole, block in zip(whole, sequence.kept_blocks, strict=True)
        )
        return self._tables.num_to_begin(sequence) - num_there

    def num_to_fill(self, sequence: Sequence) -> int:
        """Return how many host blocks, besides those that it has, a sequence that gave way can ever fill."""
        return sum(
            group.most_full(sequence.max_num_tokens)
            - (group.num_full(sequence.num_computed) if group.window is None else 0)
            for group in self._tables.groups
        )

    def _equal_to(self, kept: int) -> int | None:
        """Return the block of the home tier with the content of a kept block that some sequence holds, or None."""
        content, (_, pool) = self._blocks.key(kept), self._tables.home
        block = None if content is None else pool.published(content)
        return block if block is not None and pool.references(block) else None

    def bring_back(self, sequence: Sequence) -> None:
        """Have the KV of a sequence that gave way moved into blocks for its new row. `forget` the kept ones afterwards.

        In offload mode the host's full blocks stay where they are. The sequence may run when it `has_arrived`.
        """
        cache, tables, row = self._cache, self._tables, sequence.row
        kept, (home, pool) = dict(zip(self._places(sequence), sequence.kept_blocks, strict=True)), tables.home
        self._bring_state(sequence, sequence.kept_state)
        for number, group in enumerate(tables.groups):
            tables.begins[number, row] = group.first_needed(sequence.num_computed)
        full = {at: self._equal_to(block) for at, block in kept.items() if self._is_full(sequence, *at)}
        if tables.is_offload:
            for (number, place), equal in full.items():
                home[number, row, place] = kept[number, place] if equal is None else equal
                pool.hold(int(home[number, row, place]))
            cache.promise_host(sequence)
            self._copies.set_resident_from(sequence, [blocks.stop for blocks in tables.full(sequence)])
            tails = [at for at in kept if at not in full]
            for (number, place), block in zip(tails, self._copies.take(len(tails)), strict=True):
                tables.gpu[number, row, place] = block
            self._copies.promise_tails(sequence)
            pairs = [(int(tables.gpu[number, row, place]), kept[number, place]) for number, place in tails]
            self.transfers.load(pairs, holds_gpu=False)
        else:
            wanted = set(kept)
            for number, group in enumerate(tables.groups):
                if group.window is None:
                    wanted |= {(number, place) for place in range(group.most_blocks(sequence.num_tokens))}
            shared = {at: block for at, block in full.items() if block is not None}
            for block in shared.values():
                pool.hold(block)
            missing = sorted(wanted - shared.keys())
            new = dict(zip(missing, pool.allocate(len(missing)), strict=True))
            for (number, place), block in (shared | new).items():
                home[number, row, place] = block
            cache.promise_windows(sequence)
            self.transfers.load([(new[at], block) for at, block in kept.items() if at in new])
        self.expect(sequence)

    def bring_up(self, sequence: Sequence, pairs: list[tuple[int, int]]) -> None:
        """Have host blocks, which the caller took up, moved to a sequence's: (GPU block, host block) pairs."""
        self.transfers.load(pairs)
        for block, host_block in pairs:
            self._tables.gpu_blocks.publish(block, self._blocks.key(host_block))
        self._blocks.release(host_block for _, host_block in pairs)
        self.expect(sequence)

    def bring_state(self, sequence: Sequence, host_blocks: list[int]) -> None:
        """Have a state, whose blocks the caller took up, copied into the slot of a sequence that was let in."""
        self._bring_state(sequence, host_blocks)
        self._blocks.release(host_blocks)

    def _bring_state(self, sequence: Sequence, host_blocks: list[int]) -> None:
        if host_blocks:
            self._await(sequence, self.transfers.load_state(sequence.state_slot, host_blocks))

    def expect(self, sequence: Sequence) -> None:
        """Have an admitted sequence wait if blocks that it took up are on their way to the GPU."""
        if not self.transfers.is_idle:
            self._await(sequence, self.transfers.loading(present(self._tables.gpu[:, sequence.row])))

    def _await(self, sequence: Sequence, numbers: set[int]) -> None:
        if numbers:
            self._awaited[sequence] = self._awaited.get(sequence, set()) | numbers

    def has_arrived(self, sequence: Sequence) -> bool:
        """Whether an admitted sequence waits for no copy: its KV and state are where it reads them, and a snapshot of
        the state that its next step changes is made."""
        if sequence in self._awaited and self.transfers.have_run(self._awaited[sequence]):
            del self._awaited[sequence]
        return sequence not in self._awaited

    def prepare_snapshots(self) -> None:
        """Have memory pinned for the first snapshot in resident mode before it is wanted: else that prompt has none."""
        if self._cache.prefixes.snapshots is not None and not self._tables.is_offload:
            self._ask_for(self._tables.blocks_of_state)

    def keep_snapshots(self, sequence: Sequence, passed: Iterable[tuple[int, int]]) -> bool:
        """Have states copied to the host that are to be kept for others, where there is room, behind a step that was
        launched: those that it has left in slots of their own, (end, slot) each, which nobody else has, and the
        sequence's own. Return whether the sequence has to wait for that."""
        for end, slot in passed:
            self._keep_snapshot(sequence, end, slot)
            self._tables.lifetimes.release_slots([slot])  # the transfer holds it
        if sequence.row is None or not self._cache.prefixes.snapshots.take_due(sequence):
            return False
        numbers = self._keep_snapshot(sequence, sequence.num_computed, sequence.state_slot)
        self._await(sequence, numbers)
        return bool(numbers)

    def _keep_snapshot(self, sequence: Sequence, end: int, slot: int) -> set[int]:
        """Have the state in a slot, which is behind the tokens up to `end`, copied to the host and found there. Return
        the numbers of the groups that do it; none: it is known, or there is no room."""
        num_wanted, blocks = self._tables.blocks_of_state, self._blocks
        if self._cache.prefixes.has_state(sequence, end):
            return set()
        if self._tables.is_offload and num_wanted > min(self._cache.num_unpromised_host, blocks.num_free):
            return set()
        self._cache.prefixes.snapshots.make_room()  # before memory is asked for
        if not self._tables.is_offload:
            self._ask_for(num_wanted)
            if num_wanted > blocks.num_free:
                return set()
        taken = blocks.allocate(num_wanted)
        numbers = self.transfers.store_state(slot, taken)
        self._cache.prefixes.publish_state(sequence, end, taken)
        blocks.release(taken)  # the transfer holds them
        return numbers

    def forget(self, sequence: Sequence) -> None:
        """Give back what lies on the host of a sequence that gave way, if anything: it has its row, or has ended."""
        blocks, of_state = sequence.kept_blocks, sequence.kept_state
        sequence.kept_blocks, sequence.kept_state = None, []
        if blocks is not None:
            self.away.remove(sequence)
            self._tables.lifetimes.release_host([*blocks, *of_state])

    def release(self, sequence: Sequence) -> None:
        """Give back the row and blocks of an admitted sequence that has ended."""
        if self._awaited.pop(sequence, None) is not None and self._tables.is_offload:
            self.transfers.finish()
        self._cache.release(sequence, leave_copies=True)

    def num_host_blocks(self, running: list[Sequence]) -> int:
        """Return how many host blocks the running sequences can fill, which all are resident; a shared block is one.

        It is at least what lets each come back that gave way, when those have ended and others wait as it does: what
        these have on the host they keep.
        """
        num_filled = sum(self._tables.groups.most_full(sequence.max_num_tokens) for sequence in running)
        num_shared = self._tables.gpu_blocks.num_shared - self.transfers.num_shared
        num_shared = 0 if self._tables.windowed else num_shared  # one may leave what another one goes on to hold
        num_filled += sum(coming.on_host for coming in self._cache.coming.values())
        return max(num_filled - num_shared, max(map(self.num_to_fill, self.away), default=0))

    # Down a tier

    def send_down(self, num_left: int = 0) -> bool:
        """Have the host have what the GPU will evict next in resident mode, where there is room for it and nothing else
        moves: what a prompt computed is brought back then, and not computed again. Nobody waits for it.

        It takes host blocks that hold nothing, or what only the host has, which is older. Return whether more may be
        sent soon.

        num_left: GPU blocks that steps may take meanwhile, beside what rows were promised.
        """
        tables, host = self._tables, self._blocks
        gpu = tables.gpu_blocks
        if tables.is_offload or not host.num_planned or not gpu.num_cached:
            return False
        if not self.transfers.is_idle:
            return True
        oldest = [block for block in gpu.next_evicted(MAX_LOOKED_AT) if host.published(gpu.key(block)) is None]
        # It holds them meanwhile, so there must be as many that nobody was promised.
        oldest = oldest[: min(MAX_GROUP, max(0, self._copies.gpu_room - num_left))]
        if not oldest:
            return False
        if self._may_spill:
            self._ask_for(len(oldest))
        older = takewhile(lambda block: gpu.published(host.key(block)) is None, host.next_evicted(len(oldest)))
        oldest = oldest[: host.num_free - host.num_cached + len(list(older))]
        taken = host.allocate(len(oldest))
        self.transfers.store(list(zip(oldest, taken, strict=True)), stays=True)
        for on_gpu, on_host in zip(oldest, taken, strict=True):
            host.publish(on_host, gpu.key(on_gpu))
        host.release(taken)  # the transfer holds them
        return bool(taken) or self._may_spill and host.num_blocks < host.num_possible

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
        if keeps_prefixes:
            self.transfers.run_all()  # some are on their way whom the step that failed did not touch
        self.transfers.drop()
        self._awaited.clear()
        for sequence in others:
            if sequence.is_finished or sequence.kept_blocks is None:
                sequence.kept_blocks, sequence.kept_state = None, []
        self.away = [sequence for sequence in others if sequence.kept_blocks is not None]
        self._cache.recover(running, others)  # a sequence that waits may have been being admitted
        for sequence in running:
            self._recover_row(sequence)
        # GPU copies of host blocks are not known: a failed step may have written to some of them.
        tables, lifetimes = self._tables, self._tables.lifetimes
        tables.gpu_blocks.rebuild(present(tables.gpu), lambda content: keeps_prefixes and not tables.is_offload)
        lifetimes.recover()
        self._executor.recover(lifetimes.operation)
        kept = [block for sequence in self.away for block in [*sequence.kept_blocks, *sequence.kept_state]]
        self._blocks.rebuild(present(tables.host) + kept, lambda key: keeps_prefixes)
        self._executor.give_back_all_but(self._blocks.borrowed)
        if self._cache.prefixes.snapshots is not None:
            self._cache.prefixes.snapshots.recover()
        for sequence in running:
            self._cache.prefixes.publish_again(sequence)
        self._copies.drop(-self._copies.gpu_room)
        self._copies.drop_above_limit()

    def _recover_row(self, sequence: Sequence) -> None:
        """Rebuild a row's promises and residency from its tables and the sequence's number of computed tokens."""
        tables, row = self._tables, sequence.row
        for number, group in enumerate(tables.groups):
            tables.begins[number, row] = begin = group.first_needed(sequence.num_computed)
            tables.gpu[number, row, :begin] = tables.host[number, row, :begin] = NO_BLOCK
        if not tables.is_offload:
            tables.host[:, row] = NO_BLOCK
            self._copies.clear(row)
            self._cache.promise_windows(sequence)
            return
        firsts = []
        for number, full in enumerate(tables.full(sequence)):
            tables.host[number, row, full.stop :] = NO_BLOCK
            missing = np.flatnonzero(tables.gpu[number, row, full.start : full.stop] == NO_BLOCK)
            firsts.append(full.start + (int(missing[-1]) + 1 if len(missing) else 0))
            tables.gpu[number, row, : firsts[-1]] = NO_BLOCK
        self._cache.promise_host(sequence)
        self._copies.set_resident_from(sequence, firsts)
        self._copies.promise_tails(sequence, drops=False)
