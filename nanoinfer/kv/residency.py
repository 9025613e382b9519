"""Which full blocks stay on the GPU: integers only, no memory.

The host holds every full block, so the GPU's copy of one can be dropped at no cost. A row has a *line* of blocks in
each group of layers, and each line keeps its newest blocks: what streams is then the beginning of what the line holds,
which prefill walks in order. All blocks have as many bytes, so dropping one costs as much as dropping another.

Lines with an equal beginning share host blocks, which lie at the same place in each, and share their GPU copies. Such a
copy is made once for all lines. All lines drop it together, or its room would not become free.
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
    """For each line, the full blocks `[first, full)` that the GPU keeps; those of `[begin, first)` stream.

    Args:
        gpu_table, host_table: [num_lines, max_blocks] the GPU and host block at each place of each line, below 0 for
            none; only read.
        begin: [num_lines] the first block that a line holds; only read.

    Attributes:
        first: [num_lines] the first full block that lies on the GPU.
        full: [num_lines] the block behind the last full one.
    """

    def __init__(self, gpu_table: np.ndarray, host_table: np.ndarray, begin: np.ndarray) -> None:
        self.first, self.full = np.zeros((2, len(gpu_table)), dtype=np.int64)
        self.begin, self._gpu_table, self._host_table = begin, gpu_table, host_table

    @property
    def num_resident(self) -> int:
        """Number of full blocks of all lines that lie on the GPU; a shared block counts once per line."""
        return int((self.full - self.first).sum())

    @property
    def num_streamed(self) -> int:
        """Number of full blocks of all lines that lie on the host only; a shared block counts once per line."""
        return int(np.maximum(self.first - self.begin, 0).sum())

    @property
    def streams(self) -> np.ndarray:
        """[num_lines, most blocks] bool: which blocks of each line lie on the host only."""
        places = np.arange(self.first.max(initial=0))
        return (self.begin[:, None] <= places) & (places < self.first[:, None])

    def set(self, line: int, first: int, full: int) -> None:
        """Set a line's entries in `first` and `full`."""
        assert 0 <= first <= full
        self.first[line], self.full[line] = first, full

    def clear(self, line: int) -> None:
        """Note that the line holds no blocks any more."""
        self.set(line, 0, 0)

    def drop(self, count: int) -> list[tuple[int, int]]:
        """Drop `count` GPU copies, each the oldest of the line that keeps most.

        Returns:
            (line, block) for each line that shared a dropped copy, in the order in which the copies were dropped.
        """
        assert count <= self.num_resident, f"{count} blocks to drop, {self.num_resident} are there"
        dropped: list[tuple[int, int]] = []
        num_dropped = 0
        while num_dropped < count:
            kept = self.full - self.first
            line = int(kept.argmax())
            if kept[line] <= 0:
                break
            block, lines = self._oldest(line)
            dropped += [(line, block) for line in lines]
            self.first[lines] += 1
            num_dropped += 1
        return dropped

    def _oldest(self, line: int) -> tuple[int, list[int]]:
        """Return the line's oldest block on the GPU, and the lines that share its copy.

        Where one of these lines keeps older blocks, those must go first: return that line's oldest block then.
        """
        while True:
            block = int(self.first[line])
            same = self._gpu_table[:, block] == self._gpu_table[line, block]
            lines = np.flatnonzero(same & self._keeps(block))
            line = int(lines[self.first[lines].argmin()])
            if self.first[line] == block:
                return block, lines.tolist()

    def _keeps(self, block: int) -> np.ndarray:
        """Whether each line keeps the full block on the GPU: [num_lines] bool."""
        return (self.first <= block) & (block < self.full)

    def copy(self, block: int, host_block: int) -> int | None:
        """Return the GPU copy of a host block at place `block` of some line, or None if no copy may be taken up."""
        lines = np.flatnonzero((self._host_table[:, block] == host_block) & self._keeps(block))
        return next((copy for copy in self._gpu_table[lines, block].tolist() if copy >= 0), None)

    def join(self, lines: Sequence[int]) -> list[tuple[int, int, int]]:
        """Let `lines` take up the copies that other lines have of the newest blocks that `lines` stream.

        Returns:
            (line, block, GPU block) of each block taken up.
        """
        joined: list[tuple[int, int, int]] = []
        lines = np.array(lines, dtype=np.int64)
        while len(lines := lines[self.first[lines] > self.begin[lines]]):
            blocks = self.first[lines] - 1
            # [all lines, lines that stream]; a line that streams the block has no copy itself
            has_copy = self._host_table[:, blocks] == self._host_table[lines, blocks]
            has_copy &= self._gpu_table[:, blocks] >= 0
            has_copy &= (self.first[:, None] <= blocks) & (blocks < self.full[:, None])
            holders, found = has_copy.argmax(axis=0), has_copy.any(axis=0)
            lines, blocks, holders = lines[found], blocks[found], holders[found]
            joined += zip(lines.tolist(), blocks.tolist(), self._gpu_table[holders, blocks].tolist(), strict=True)
            self.first[lines] -= 1
        return joined

    def promote(self, count: int, lines: Sequence[int]) -> list[tuple[int, int]]:
        """Take back up to `count` blocks for `lines`: the newest that stream, of the line that keeps fewest first.

        Rows whose newest streamed block is the same host block get it together; it counts once. A block that a line can
        `join` gets no second copy.

        Returns:
            (line, block) of each block taken back; blocks of one line in ascending order.
        """
        promoted: dict[int, list[int]] = {}
        new: set[int] = set()
        for line in sorted(lines, key=lambda line: (self.full[line] - self.first[line], line)):
            while self.first[line] > self.begin[line]:
                block = int(self.first[line]) - 1
                host_block = int(self._host_table[line, block])
                if host_block not in new:
                    if len(new) == count or self.copy(block, host_block) is not None:
                        break
                    new.add(host_block)
                promoted.setdefault(line, []).append(block)
                self.first[line] = block
        return [(line, block) for line, blocks in promoted.items() for block in reversed(blocks)]
