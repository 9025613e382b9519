"""Where the blocks of each row lie, and who holds them: the state that the KV cache's parts share."""

from __future__ import annotations

import numpy as np

from nanoinfer.step.plan import NO_BLOCK
from offload import BlockLifetimes


class BlockTables:
    """Block tables of all rows for both tiers, GPU and host, who holds their blocks, and the mode.

    Both tiers are there in both modes. In resident mode the host's holds no block of a row.

    Args:
        lifetimes: who holds which block of either tier, and when released ones may be handed out again.
        max_num_seqs: number of rows.
        max_blocks_per_seq: logical blocks of a row.

    Attributes:
        gpu, host: [max_num_seqs, max_blocks_per_seq] int32, where each row's blocks lie (or `NO_BLOCK`).
        versions: [max_num_seqs] int64, counts up whenever GPU blocks of the row come or go.
        gpu_blocks: who holds which block of the GPU pool.
        is_offload: whether the mode is offload mode.
        home: table and pool of the tier in which full blocks are published. Only `Switch` sets the two.
        rows_without_tail: the rows to which a GPU block is promised; none in resident mode.
    """

    def __init__(self, block_size: int, lifetimes: BlockLifetimes, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.block_size = block_size
        self.gpu = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.host = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.versions = np.zeros(max_num_seqs, dtype=np.int64)
        self.lifetimes, self.gpu_blocks = lifetimes, lifetimes.gpu_blocks
        self.is_offload, self.home = False, (self.gpu, self.gpu_blocks)
        self.rows_without_tail: set[int] = set()

    @property
    def all_rows_fit(self) -> bool:
        """Whether the GPU pool holds all rows, however long they grow."""
        return self.gpu.size <= self.gpu_blocks.num_blocks

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def present(row: np.ndarray) -> list[int]:
    """Return the blocks in a part of a table."""
    return row[row != NO_BLOCK].tolist()
