"""Which full blocks stay on the GPU: integers only, no memory.

The host holds every full block, so the GPU's copy of one can be dropped at no cost. Each row keeps its newest blocks:
what streams is then a prefix of the row, which prefill walks in order, and a sliding window, which reads the newest
tokens only, never streams. A block lies on the GPU with all its layers, so every full-attention layer streams the same
number of bytes.
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

    Attributes:
        first: [num_rows] the first full block that lies on the GPU.
        full: [num_rows] number of full blocks.
        window: [num_rows] the first block that a sliding window still reads; blocks from there on are dropped last.
    """

    def __init__(self, num_rows: int) -> None:
        self.first = np.zeros(num_rows, dtype=np.int64)
        self.full = np.zeros(num_rows, dtype=np.int64)
        self.window = np.zeros(num_rows, dtype=np.int64)

    @property
    def num_resident(self) -> int:
        """Full blocks on the GPU; all of them can be dropped."""
        return int((self.full - self.first).sum())

    @property
    def num_streamed(self) -> int:
        """Full blocks that lie on the host only."""
        return int(self.first.sum())

    def set(self, row: int, first: int, full: int, window: int) -> None:
        """Notes a row's blocks; see the attributes."""
        assert 0 <= first <= full
        self.first[row], self.full[row], self.window[row] = first, full, min(window, full)

    def clear(self, row: int) -> None:
        """The row holds nothing any more."""
        self.set(row, 0, 0, 0)

    def drop(self, count: int) -> list[tuple[int, int]]:
        """Drops `count` blocks: the oldest of whichever row keeps most, windows last.

        Returns:
            (row, block) of each, in the order in which they were dropped.
        """
        assert count <= self.num_resident, f"{count} blocks to drop, {self.num_resident} are there"
        dropped: list[tuple[int, int]] = []
        for end in (self.window, self.full):
            while len(dropped) < count:
                spare = end - self.first
                row = int(spare.argmax())
                if spare[row] <= 0:
                    break
                dropped.append((row, int(self.first[row])))
                self.first[row] += 1
        return dropped

    def promote(self, count: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Takes back up to `count` blocks of `rows`: the newest that stream, of the row that keeps fewest first.

        Returns:
            (row, block) of each; blocks of one row in ascending order.
        """
        promoted: list[tuple[int, int]] = []
        for row in sorted(rows, key=lambda row: (self.full[row] - self.first[row], row)):
            taken = min(count - len(promoted), int(self.first[row]))
            promoted += [(row, block) for block in range(int(self.first[row]) - taken, int(self.first[row]))]
            self.first[row] -= taken
            if len(promoted) == count:
                break
        return promoted
