"""Whole blocks on their way between GPU and host, beside the steps: in groups, each a few copies in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from nanoinfer.kv.tables import BlockTables
from nanoinfer.step.executor import Executor
from offload.layout import runs
from offload.lifetimes import FILLS, LOAD_RULE, STORE_RULE, WRITES

# To enqueue a copy takes some 4 us, and whoever runs waits for that: about 2 ms in a step.
MAX_COPIES = 500
# Blocks and bytes of a group: who waits for a few of them does not wait for all.
MAX_GROUP, GROUP_BYTES = 16, 64 * 2**20
# Bytes on their way at a time. The copy engine takes one copy after the other, so a step's tokens, on their way to the
# host, wait for what came before them: on an H100 all of 4.8 GB at once kept another row waiting for 70 ms. As much is
# on its way as runs within a step, between these two: a step waits for its tokens, so it gets longer by what is on its
# way, and that seems to run within it however much it is. A link of 55 GB/s moves the most in 5 ms.
LEAST_BYTES, MOST_BYTES = 32 * 2**20, 256 * 2**20
# Bytes to or from pageable memory in a step, whole layers of one block. The host itself copies these, at some GB/s.
PAGEABLE_BYTES = 8 * 2**20


@dataclass(eq=False)
class _Group:
    """Blocks that move together.

    Attributes:
        number: groups are enqueued in the order of their numbers.
        pairs: (GPU block, host block) of each; or pieces of states, as `OffloadEngine.store` takes them.
        operation: under which the copies are acknowledged; 0: not all of them are enqueued yet.
        holds_gpu: whether the group holds its GPU blocks.
        stays: whether the GPU keeps the blocks as they are, the next ones that it evicts.
        of_states: whether it is pieces of states that move; the group holds the slot of each.
        is_pageable: whether its host block lies in pageable memory.
        num_sent: places of a block that are enqueued so far: of pageable memory some in each step.
    """

    number: int
    pairs: list[tuple[int, int]]
    num_copies: int
    is_load: bool
    holds_gpu: bool
    stays: bool = False
    of_states: bool = False
    is_pageable: bool = False
    num_sent: int = 0
    operation: int = 0


class Transfers:
    """Moves blocks in the order in which it is asked to.

    A group holds its blocks in both tiers until its copies are acknowledged, so none is handed out before, whatever
    becomes of their sequence. In offload mode it does not hold those on the GPU, where rows share none but copies: one
    who gives such a block back waits (`finish`).

    Args:
        executor: copies.

    Attributes:
        groups: those whose copies have not run, as far as is known.
    """

    def __init__(self, tables: BlockTables, executor: Executor) -> None:
        self._tables, self._executor, self._num_places = tables, executor, executor.layout.num_places
        self.groups: list[_Group] = []
        self._number, self._block_bytes, self._most_bytes = 0, executor.layout.block_bytes, 4 * LEAST_BYTES

    def store(self, pairs: list[tuple[int, int]], *, stays: bool = False) -> None:
        """Move (GPU block, host block) pairs to the host; or copy them there, of cached blocks that stay so."""
        self._add(pairs, is_load=False, holds_gpu=True, stays=stays)

    def load(self, pairs: list[tuple[int, int]], *, holds_gpu: bool = True) -> None:
        """Move (GPU block, host block) pairs to the GPU."""
        self._add(pairs, is_load=True, holds_gpu=holds_gpu)

    def store_state(self, slot: int, host_blocks: list[int]) -> set[int]:
        """Copy the state in a slot to host blocks; return the numbers of the groups that do it."""
        return self._add(self._pieces(slot, host_blocks), is_load=False, holds_gpu=False, of_states=True)

    def load_state(self, slot: int, host_blocks: list[int]) -> set[int]:
        """Copy a state from host blocks into a slot; return the numbers of the groups that do it."""
        return self._add(self._pieces(slot, host_blocks), is_load=True, holds_gpu=False, of_states=True)

    def _pieces(self, slot: int, host_blocks: list[int]) -> list[tuple[int, int]]:
        first = slot * self._tables.blocks_of_state
        return [(first + piece, block) for piece, block in enumerate(host_blocks)]

    def _slots(self, group: _Group) -> list[int]:
        """Return the slot of each piece of a group that moves states."""
        return [piece // self._tables.blocks_of_state for piece, _ in group.pairs]

    def _add(
        self,
        pairs: list[tuple[int, int]],
        *,
        is_load: bool,
        holds_gpu: bool,
        stays: bool = False,
        of_states: bool = False,
    ) -> set[int]:
        begin, first, borrowed = 0, self._number + 1, self._tables.lifetimes.host_blocks.borrowed
        while begin < len(pairs):
            most = max(1, min(MAX_GROUP, MAX_COPIES // self._num_places, GROUP_BYTES // self._block_bytes))
            is_pageable = pairs[begin][1] in borrowed
            pinned = takewhile(lambda pair: pair[1] not in borrowed, pairs[begin : begin + most])
            group = pairs[begin : begin + 1] if is_pageable else list(pinned)
            begin += len(group)
            for on_gpu, on_host in group:
                if holds_gpu:
                    self._tables.gpu_blocks.hold(on_gpu)
                self._tables.lifetimes.host_blocks.hold(on_host)
            self._number += 1
            num_copies = len(group if of_states else runs(group)) * self._num_places
            moved = _Group(self._number, group, num_copies, is_load, holds_gpu, stays, of_states, is_pageable)
            self.groups.append(moved)
            if of_states:
                for slot in self._slots(self.groups[-1]):
                    self._tables.lifetimes.slots.hold(slot)
        return set(range(first, self._number + 1))

    @property
    def held(self) -> tuple[list[int], list[int]]:
        """GPU blocks and host blocks that are held here, each as often as it is."""
        on_gpu = [on_gpu for group in self.groups if group.holds_gpu for on_gpu, _ in group.pairs]
        return on_gpu, [on_host for group in self.groups for _, on_host in group.pairs]

    def have_run(self, numbers: set[int]) -> bool:
        """Whether all groups with these numbers have moved what they move."""
        return numbers.isdisjoint(group.number for group in self.groups)

    def loading(self, blocks: Iterable[int]) -> set[int]:
        """Return the numbers of the groups that bring any of these GPU blocks."""
        wanted, loads = set(blocks), [group for group in self.groups if group.is_load and not group.of_states]
        return {group.number for group in loads if any(on_gpu in wanted for on_gpu, _ in group.pairs)}

    @property
    def num_leaving(self) -> int:
        """GPU blocks that are free once what is on its way to the host has left."""
        references = self._tables.gpu_blocks.references
        moved = [group.pairs for group in self.groups if not (group.is_load or group.of_states)]
        leaving = [on_gpu for pairs in moved for on_gpu, _ in pairs]
        return sum(references(block) == 1 for block in leaving)

    @property
    def num_shared(self) -> int:
        """References to GPU blocks that are held here and by somebody else."""
        held = Counter(self.held[0])
        references = self._tables.gpu_blocks.references
        return sum(count - (references(block) == count) for block, count in held.items())

    @property
    def is_idle(self) -> bool:
        return not self.groups

    def advance(self) -> None:
        """Enqueue what comes next, as much as a step may be kept waiting for."""
        num_copies, num_bytes = 0, self._num_bytes([group for group in self.groups if group.operation])
        for group in self.groups:
            if not group.operation:
                num_copies, of_group = num_copies + group.num_copies, self._num_bytes([group])
                is_first, most_bytes = num_copies == group.num_copies, 0 if group.is_pageable else self._most_bytes
                if MAX_COPIES < num_copies and not is_first or num_bytes and num_bytes + of_group > most_bytes:
                    break
                if group.is_pageable:
                    self._enqueue(group, max(1, self._num_places * PAGEABLE_BYTES // self._block_bytes))
                    break
                self._enqueue(group)
                num_bytes += of_group

    def _num_bytes(self, groups: list[_Group]) -> int:
        return sum(len(group.pairs) for group in groups) * self._block_bytes

    def end_step(self) -> None:
        """Let go of the blocks whose copies have run in the newest step, and have as much on its way as runs in one."""
        was_moving = any(group.operation and not group.is_pageable for group in self.groups)
        self.let_go()
        if was_moving:
            have_run = not any(group.operation for group in self.groups)
            most = 2 * self._most_bytes if have_run else self._most_bytes // 2
            self._most_bytes = min(max(most, LEAST_BYTES), MOST_BYTES)

    def let_go(self) -> None:
        """Let go of the blocks whose copies have run."""
        if not self.groups:
            return
        lifetimes, left = self._tables.lifetimes, []
        for group in self.groups:
            if group.operation and lifetimes.acknowledgements.has_run(*_part(group)):
                if group.holds_gpu:
                    lifetimes.release_gpu([on_gpu for on_gpu, _ in group.pairs])
                if group.of_states:
                    lifetimes.release_slots(self._slots(group))
                if group.stays:
                    lifetimes.gpu_blocks.put_first(on_gpu for on_gpu, _ in group.pairs)
                lifetimes.release_host([on_host for _, on_host in group.pairs])
            else:
                left.append(group)
        self.groups = left
        lifetimes.reclaim()

    def wait(self) -> None:
        """Enqueue what comes next, and wait until the first of it has arrived: for who has nothing else to do."""
        self.advance()
        for group in self.groups[:1]:
            self._tables.lifetimes.acknowledgements.wait(*_part(group))
        self.let_go()

    def finish(self) -> None:
        """Wait until all has arrived."""
        self.run_all()
        self.let_go()

    def run_all(self) -> None:
        """Wait until all copies have run, and let go of nothing: some may have been let go of, after an exception."""
        if self.groups:
            self._enqueue_all()
            self._executor.drain()

    def drop(self) -> None:
        """Forget all of it, after an exception; whoever calls rebuilds both pools."""
        self.groups = []

    def _enqueue_all(self) -> None:
        for group in self.groups:
            if not group.operation:
                self._enqueue(group)

    def _enqueue(self, group: _Group, most_places: int | None = None) -> None:
        """most_places: the most places of a block whose copies are enqueued now; None: all that are left."""
        lifetimes, begin, end = self._tables.lifetimes, group.num_sent, self._num_places
        end = end if most_places is None else min(begin + most_places, end)
        operation = lifetimes.begin()
        move = self._executor.load if group.is_load else self._executor.store
        move(group.pairs, operation, group.of_states, (begin, end))
        group.num_sent = end
        if end == self._num_places:
            group.operation = operation


def _part(group: _Group) -> tuple[str, int, str]:
    return (FILLS, group.operation, LOAD_RULE) if group.is_load else (WRITES, group.operation, STORE_RULE)
