"""Where the blocks of each row lie, and who holds them: the state that the KV cache's parts share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK
from offload import BlockLifetimes, KVGroups


class BlockTables:
    """Block tables of all rows for both tiers, GPU and host, who holds their blocks, and the mode.

    Both tiers are there in both modes. In resident mode the host's holds no block of a row.

    Args:
        lifetimes: who holds which block of either tier, and when released ones may be handed out again.
        max_num_seqs: number of rows.
        max_model_len: tokens of a row at most.
        blocks_of_state: host blocks whose bytes a sequence's state fills; 0: no layer keeps one.
        num_draft_slots: slots of states beyond those of as many sequences as may run.

    Attributes:
        groups: the groups of layers, each of which has blocks of its own.
        block_size: tokens of the largest blocks; equal beginnings end at a multiple of it.
        gpu, host: [groups, max_num_seqs, width] int32, where each row's blocks lie (or `NO_BLOCK`). What lies behind a
            group's window is on neither tier.
        begins: [groups, max_num_seqs] int64, the first block that the row's next token sees.
        promised: [groups, max_num_seqs] int64, GPU blocks that a row is promised beside those that it has.
        gpu_versions: [max_num_seqs] int64, counts up whenever GPU blocks of the row come or go.
        gpu_blocks: who holds which block of the GPU pool.
        is_offload: whether the mode is offload mode.
        home: table and pool of the tier in which full blocks are published. Only `Switch` sets the two.
        owners: of each block of the home tier in a group with a window, the row whose promise counts it. Rows that
            share a block leave it behind at different times, and it is free when the last one does: so one of them
            counts it at a time, and hands it on (`pass_on`).
    """

    def __init__(
        self,
        groups: KVGroups,
        lifetimes: BlockLifetimes,
        max_num_seqs: int,
        max_model_len: int,
        blocks_of_state: int = 0,
        num_draft_slots: int = 0,
    ) -> None:
        self.groups, self._max_model_len, self.blocks_of_state = groups, max_model_len, blocks_of_state
        self.num_draft_slots = num_draft_slots
        self.block_size = groups.block_size
        shape = (len(groups), max_num_seqs, groups.table_width(max_model_len))
        self.gpu = np.full(shape, NO_BLOCK, dtype=np.int32)
        self.host = np.full(shape, NO_BLOCK, dtype=np.int32)
        self.begins, self.promised = np.zeros((2, len(groups), max_num_seqs), dtype=np.int64)
        self.gpu_versions = np.zeros(max_num_seqs, dtype=np.int64)
        self.lifetimes, self.gpu_blocks = lifetimes, lifetimes.gpu_blocks
        self.is_offload, self.home = False, (self.gpu, self.gpu_blocks)
        self.owners: dict[int, int] = {}
        self.windowed = [number for number, group in enumerate(groups) if group.window is not None]

    @property
    def num_rows(self) -> int:
        return self.gpu.shape[1]

    @property
    def all_sequences_fit(self) -> bool:
        """Whether the GPU pool holds as many sequences as may run, however long they grow."""
        num_running = min(self.num_rows, self.lifetimes.slots.num_blocks - self.num_draft_slots)
        return num_running * self.groups.most_blocks(self._max_model_len) <= self.gpu_blocks.num_blocks

    def num_to_begin(self, sequence: Sequence) -> int:
        """Return the GPU blocks that a sequence must find to begin in resident mode with its tokens so far.

        Where a window bounds what it holds these are as many as it can ever hold: blocks there come and go.
        """
        return sum(
            group.most_blocks(sequence.num_tokens if group.window is None else sequence.max_num_tokens)
            for group in self.groups
        )

    def num_splits(self, num_tokens: int) -> int:
        """Return how many blocks a row of so many tokens attends to in a layer at most."""
        return max(group.most_blocks(num_tokens) for group in self.groups)

    def num_own(self, number: int, row: int) -> int:
        """Return how many of a row's blocks in a group with a window it counts as its own. What nobody counts, and
        only rows hold, it counts from now on."""
        (table, pool), count = self.home, 0
        for place, block in self._held(number, row, int(self.begins[number, row])):
            owner = self.owners.get(block)
            if owner is None:
                holders = pool.num_staying(block)
                if holders == 1 or holders == np.count_nonzero(table[number, :, place] == block):
                    self.owners[block] = owner = row
            count += owner == row
        return count

    def pass_on(self, number: int, row: int, begin: int, end: int | None = None) -> set[int]:
        """Have others count what a row counts of these places, which it is about to leave; return their rows.

        end: None: it gives back all that it has. What a copy on its way holds, too, nobody counts then: it is not free
        when the last row leaves it. So whoever counted it is promised another one, which the row itself needs no more.
        """
        (table, pool), others = self.home, set()
        for place, block in self._held(number, row, begin, end):
            if (owner := self.owners.get(block)) != row and (owner is None or end is not None):
                continue
            rows = np.flatnonzero(table[number, :, place] == block).tolist()
            if end is None and pool.num_staying(block) > len(rows):
                del self.owners[block]
                others |= {owner} - {row}
            elif owner == row:
                del self.owners[block]
                if left := [other for other in rows if other != row]:
                    self.owners[block] = left[0]
                    others.add(left[0])
        return others

    def _held(self, number: int, row: int, begin: int, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield place and block of what a row holds between two places of the home tier's table."""
        line = self.home[0][number, row, begin:end]
        places = np.flatnonzero(line != NO_BLOCK)
        yield from zip((places + begin).tolist(), line[places].tolist(), strict=True)

    def full(self, sequence: Sequence) -> list[range]:
        """Return for each group the full blocks that an admitted sequence has, those behind the window left out."""
        ends = [sequence.num_computed // group.block_size for group in self.groups]
        begins = self.begins[:, sequence.row].tolist()
        return [range(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]


def present(blocks: np.ndarray) -> list[int]:
    """Return the blocks in a part of a table."""
    return blocks[blocks != NO_BLOCK].tolist()
