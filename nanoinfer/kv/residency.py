"""Which full blocks stay on the GPU: integers only, no memory.

The host holds every full block, so the GPU's copy of one can be dropped at no cost. Each row keeps its newest blocks:
what streams is then a prefix of the row, which prefill walks in order, and a sliding window, which reads the newest
tokens only, never streams. A block lies on the GPU with all its layers, so every full-attention layer streams the same
number of bytes.

Rows with an equal beginning share host blocks, which lie at the same place in each of them, and share the GPU's copies
of these: a copy comes once for all, and is dropped by all at once, or its room would not be free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Blocks that come back to the GPU in one step: each costs one small copy per layer on the compute stream.
MAX_PROMOTED = 8


def promotion_margin(num_rows: int) -> int:
    """GPU blocks that are left free for rows that grow, when blocks come back: a few rows want one in the same step."""
    return num_rows // 16 + 2


class Residency:
    """For each row, the full blocks `[first, full)` that the GPU keeps; those before stream.

    Args:
        gpu_table, host_table: [num_rows, max_blocks] the GPU and host block at each place of each row, below 0 for
            none; only read. None: no two rows share a block.
        joins: whether a row may take up a copy that another row has. With sliding windows it may lack layers whose
            window had moved on in that row.

    Attributes:
        first: [num_rows] the first full block that lies on the GPU.
        full: [num_rows] number of full blocks.
        window: [num_rows] the first block that a sliding window still reads; blocks from there on are dropped last.
    """

    def __init__(
        self,
        num_rows: int,
        gpu_table: np.ndarray | None = None,
        host_table: np.ndarray | None = None,
        joins: bool = True,
    ) -> None:
        self.first = np.zeros(num_rows, dtype=np.int64)
        self.full = np.zeros(num_rows, dtype=np.int64)
        self.window = np.zeros(num_rows, dtype=np.int64)
        self._gpu_table, self._host_table = gpu_table, host_table
        self._joins = joins and gpu_table is not None

    @property
    def num_resident(self) -> int:
        """Full blocks of all rows that lie on the GPU; one that rows share counts for each."""
        return int((self.full - self.first).sum())

    @property
    def num_streamed(self) -> int:
        """Full blocks of all rows that lie on the host only; one that rows share counts for each."""
        return int(self.first.sum())

    def set(self, row: int, first: int, full: int, window: int) -> None:
        """Notes a row's blocks; see the attributes."""
        assert 0 <= first <= full
        self.first[row], self.full[row], self.window[row] = first, full, min(window, full)

    def clear(self, row: int) -> None:
        """The row holds nothing any more."""
        self.set(row, 0, 0, 0)

    def drop(self, count: int) -> list[tuple[int, int]]:
        """Drops `count` of the GPU's copies: the oldest of whichever row keeps most, windows last.

        Returns:
            (row, block) of each, in the order in which they were dropped; one for each row that shared the copy.
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
        """The row's oldest block on the GPU, and the rows that share its copy.

        Where one of these keeps older blocks, they must go first: that row's oldest block then.
        """
        while True:
            block = int(self.first[row])
            if self._gpu_table is None:
                return block, [row]
            same = self._gpu_table[:, block] == self._gpu_table[row, block]
            rows = np.flatnonzero(same & self._keeps(block))
            row = int(rows[self.first[rows].argmin()])
            if self.first[row] == block:
                return block, rows.tolist()

    def _keeps(self, block: int) -> np.ndarray:
        """[num_rows] whether each row keeps the full block on the GPU."""
        return (self.first <= block) & (block < self.full)

    def copy(self, block: int, host_block: int) -> int | None:
        """The GPU's copy of a host block that is block `block` of some row, if one may take it up."""
        if not self._joins:
            return None
        rows = np.flatnonzero((self._host_table[:, block] == host_block) & self._keeps(block))
        return next((copy for copy in self._gpu_table[rows, block].tolist() if copy >= 0), None)

    def join(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Lets rows take up copies that others have of the newest blocks that they stream.

        Returns:
            (row, block, GPU block) of each.
        """
        joined: list[tuple[int, int, int]] = []
        rows = np.array(rows if self._joins else [], dtype=np.int64)
        while len(rows := rows[self.first[rows] > 0]):
            blocks = self.first[rows] - 1
            # [rows of all, rows that stream]: none of the latter keeps its own
            has_copy = self._host_table[:, blocks] == self._host_table[rows, blocks]
            has_copy &= self._gpu_table[:, blocks] >= 0
            has_copy &= (self.first[:, None] <= blocks) & (blocks < self.full[:, None])
            holders, found = has_copy.argmax(axis=0), has_copy.any(axis=0)
            rows, blocks, holders = rows[found], blocks[found], holders[found]
            joined += zip(rows.tolist(), blocks.tolist(), self._gpu_table[holders, blocks].tolist(), strict=True)
            self.first[rows] -= 1
        return joined

    def promote(self, count: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Takes back up to `count` blocks for `rows`: the newest that stream, of the row that keeps fewest first.

        Rows whose newest one is the same host block get it together, as one. Of a block that a row can `join` no second
        copy is made.

        Returns:
            (row, block) of each; blocks of one row in ascending order.
        """
        promoted: dict[int, list[int]] = {}
        new: set[object] = set()
        for row in sorted(rows, key=lambda row: (self.full[row] - self.first[row], row)):
            while self.first[row] > 0:
                block = int(self.first[row]) - 1
                host_block = (row, block) if self._host_table is None else int(self._host_table[row, block])
                if host_block not in new:
                    if len(new) == count or self.copy(block, host_block) is not None:
                        break
                    new.add(host_block)
                promoted.setdefault(row, []).append(block)
                self.first[row] = block
        return [(row, block) for row, blocks in promoted.items() for block in reversed(blocks)]
