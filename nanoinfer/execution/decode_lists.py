"""What a decode step attends to, and what streams for it: the plan's block tables as lists of splits."""

from __future__ import annotations

from functools import partial

import numpy as np

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.execution.splits import SplitLists, resident_key, split_lists
from nanoinfer.kernels.attention.limits import MAX_TILES_APART, SHORT_BLOCKS
from offload import StreamPlan, pack


class DecodeLists:
    """Makes the lists of decode steps.

    Args:
        windows: the window of each layer; None: full attention.
        blocks_per_slot: blocks that a ring slot holds.

    Attributes:
        windows: the distinct windows.
        kind: layer -> index into `windows`.
    """

    def __init__(
        self, windows: tuple[int | None, ...], backend: AttentionBackend, block_size: int, blocks_per_slot: int
    ) -> None:
        self.windows = list(dict.fromkeys(windows))
        self.kind = [self.windows.index(window) for window in windows]
        self._backend, self._block_size, self._blocks_per_slot = backend, block_size, blocks_per_slot

    def splits(
        self, size: int, gpu_blocks: np.ndarray, host_blocks: np.ndarray, lengths: np.ndarray
    ) -> list[SplitLists]:
        """Return for each window where the splits of the rows lie.

        Args:
            size: rows of the padded batch.
            gpu_blocks, host_blocks: the rows' block tables, [rows, any number of blocks].
            lengths: [rows] tokens of each.
        """
        partials_per_block = partial(self.partials_per_block, size)
        return [
            split_lists(gpu_blocks, host_blocks, lengths, window, self._block_size, partials_per_block)
            for window in self.windows
        ]

    def key(self, size: int, rows: np.ndarray, lengths: np.ndarray) -> bytes:
        """Return a key of all that `splits` depends on besides the rows' blocks, if nothing streams."""
        partials_per_block = partial(self.partials_per_block, size)
        return resident_key(size, rows, lengths, self.windows, self._block_size, partials_per_block)

    def partials_per_block(self, size: int, num_blocks: np.ndarray) -> np.ndarray:
        """Return the partials per block of each row, given the number of blocks that it reads; both [rows].

        Short rows are cut into tiles so that more programs have work.
        """
        tiles, is_short = self._backend.tiles_per_block, num_blocks <= SHORT_BLOCKS
        cuts = self.may_cut(size) and np.sum(num_blocks[is_short]) * tiles <= MAX_TILES_APART
        return np.where(is_short & cuts, tiles, 1)

    def may_cut(self, size: int) -> bool:
        """Whether blocks of a padded batch may be cut. The merge of larger batches is compiled without tiles."""
        return 1 < self._backend.tiles_per_block <= MAX_TILES_APART // size

    def stream_plan(self, lists: list[SplitLists], beside: StreamPlan | None = None) -> StreamPlan:
        """Return what streams for these splits, besides what already passes for the same step's prompts."""
        chunks = []
        for index, found in enumerate(lists):
            blocks = found.host_blocks
            if beside is not None and (passing := beside.blocks(self.kind.index(index))):
                blocks = np.setdiff1d(blocks, passing)
            chunks.append(pack(blocks, self._blocks_per_slot))
        return StreamPlan(tuple(chunks[kind] for kind in self.kind))
