"""Which full blocks stay on the GPU: integers only, no memory.

The host holds every full block, so the GPU's copy of one can be dropped at no cost. Each row keeps its newest blocks:
what streams is then a prefix of the row, which prefill walks in order, and a sliding window, which reads the newest
tokens only, never streams. A block lies on the GPU with all its layers, so every full-attention layer streams the same
number of bytes.

Rows with an equal beginning share host blocks, which lie at the same place in each row, and share their GPU copies.
Such a copy is made once for all rows. All rows drop it together, or its room would not become free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Blocks that come back to the GPU in one step: each costs one small copy per layer on the compute stream.
MAX_PROMOTED = 8


def promotion_margin(num_rows: int) -> int:
    """Return the GPU blocks that promotion leaves free for rows that grow: a few rows want one in the same step."""
    return num_rows // 16 + 2


class Residency:
    """For each row, the full blocks `[first, full)` that the GPU keeps; those before stream.

    Args:
        gpu_table, host_table: [num_rows, max_blocks] the GPU and host block at each place of each row, below 0 for
            none; only read.
        joins: whether a row may take up a copy that another row has. With sliding windows, the copy may lack layers
            whose window had moved on in the other row.

    Attributes:
        first: [num_rows] the first full block that lies on the GPU.
        full: [num_rows] number of full blocks.
        window: [num_rows] the first block that a sliding window still reads; blocks from there on are dropped last.
    """

    def __init__(self, gpu_table: np.ndarray, host_table: np.ndarray, joins: bool = True) -> None:
        self.first, self.full, self.window = np.zeros((3, len(gpu_table)), dtype=np.int64)
        self._gpu_table, self._host_table = gpu_table, host_table
        self._joins = joins

    @property
    def num_resident(self) -> int:
        """Number of full blocks of all rows that lie on the GPU; a shared block counts once per row."""
        return int((self.full - self.first).sum())

    @property
    def num_streamed(self) -> int:
        """Number of full blocks of all rows that lie on the host only; a shared block counts once per row."""
        return int(self.first.sum())

    def set(self, row: int, first: int, full: int, window: int) -> None:
        """Set a row's entries in `first`, `full` and `window`, the last cut to `full`."""
        assert 0 <= first <= full
        self.first[row], self.full[row], self.window[row] = first, full, min(window, full)

    def clear(self, row: int) -> None:
        """Note that the row holds no blocks any more."""
        self.set(row, 0, 0, 0)

    def drop(self, count: int) -> list[tuple[int, int]]:
        """Drop `count` GPU copies, each the oldest of the row that keeps most; blocks that a window reads go last.

        Returns:
            (row, block) for each row that shared a dropped copy, in the order in which the copies were dropped.
        """
        assert count <= self.num_resident, f"{count} blocks to drop, {self.num_resident} are there"
        dropped: list[tuple[int, int]] = []
        num_dropped = 0
        for end in (self.window, self.full):
            while num_dropped < count:
                spare = end - self.first
                row = int(spare.argmax())
                if spare[row] <= 0:
                    break
                block, rows = self._oldest(row)
                dropped += [(row, block) for row in rows]
                self.first[rows] += 1
                num_dropped += 1
        return dropped

    def _oldest(self, row: int) -> tuple[int, list[int]]:
        """Return the row's oldest block on the GPU, and the rows that share its copy.

        Where one of these rows keeps older blocks, those must go first: return that row's oldest block then.
        """
        while True:
            block = int(self.first[row])
            same = self._gpu_table[:, block] == self._gpu_table[row, block]
            rows = np.flatnonzero(same & self._keeps(block))
            row = int(rows[self.first[rows].argmin()])
            if self.first[row] == block:
                return block, rows.tolist()

    def _keeps(self, block: int) -> np.ndarray:
        """Whether each row keeps the full block on the GPU: [num_rows] bool."""
        return (self.first <= block) & (block < self.full)

    def copy(self, block: int, host_block: int) -> int | None:
        """Return the GPU copy of a host block at place `block` of some row, or None if no copy may be taken up."""
        if not self._joins:
            return None
        rows = np.flatnonzero((self._host_table[:, block] == host_block) & self._keeps(block))
        return next((copy for copy in self._gpu_table[rows, block].tolist() if copy >= 0), None)

    def join(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Let `rows` take up the copies that other rows have of the newest blocks that `rows` stream.

        Returns:
            (row, block, GPU block) of each block taken up.
        """
        joined: list[tuple[int, int, int]] = []
        rows = np.array(rows if self._joins else [], dtype=np.int64)
        while len(rows := rows[self.first[rows] > 0]):
            blocks = self.first[rows] - 1
            # [all rows, rows that stream]; a row that streams the block has no copy itself
            has_copy = self._host_table[:, blocks] == self._host_table[rows, blocks]
            has_copy &= self._gpu_table[:, blocks] >= 0
            has_copy &= (self.first[:, None] <= blocks) & (blocks < self.full[:, None])
            holders, found = has_copy.argmax(axis=0), has_copy.any(axis=0)
            rows, blocks, holders = rows[found], blocks[found], holders[found]
            joined += zip(rows.tolist(), blocks.tolist(), self._gpu_table[holders, blocks].tolist(), strict=True)
            self.first[rows] -= 1
        return joined

    def promote(self, count: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Take back up to `count` blocks for `rows`: the newest that stream, of the row that keeps fewest first.

        Rows whose newest streamed block is the same host block get it together; it counts once. A block that a row can
        `join` gets no second copy.

        Returns:
            (row, block) of each block taken back; blocks of one row in ascending order.
        """
        promoted: dict[int, list[int]] = {}
        new: set[int] = set()
        for row in sorted(rows, key=lambda row: (self.full[row] - self.first[row], row)):
            while self.first[row] > 0:
                block = int(self.first[row]) - 1
                host_block = int(self._host_table[row, block])
                if host_block not in new:
                    if len(new) == count or self.copy(block, host_block) is not None:
                        break
                    new.add(host_block)
                promoted.setdefault(row, []).append(block)
                self.first[row] = block
        return [(row, block) for row, blocks in promoted.items() for block in reversed(blocks)]
