"""Where the blocks of each row lie, and who holds them: the state that the KV cache's parts share."""

from __future__ import annotations

import numpy as np

from nanoinfer.step.plan import NO_BLOCK
from offload import BlockLifetimes, BlockPool


class BlockTables:
    """Block tables of all rows, and the GPU pool's block numbers.

    Args:
        num_gpu_blocks: blocks of the GPU pool. Block 0 is scratch: padding rows write there.
        max_num_seqs: number of rows.
        max_blocks_per_seq: logical blocks of a row.

    Attributes:
        gpu, host: [max_num_seqs, max_blocks_per_seq] int32, where each row's blocks lie (or `NO_BLOCK`).
        versions: [max_num_seqs] int64, changes when the part of a row's GPU table does that decode steps need.
        gpu_blocks: who holds which block of the GPU pool.
        lifetimes: when released blocks may be handed out again, and who holds which host block; set while in offload
            mode.
        rows_without_tail: in offload mode, the rows to which a GPU block is promised.
    """

    def __init__(self, block_size: int, num_gpu_blocks: int, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.block_size = block_size
        self.gpu = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.host = np.full((max_num_seqs, max_blocks_per_seq), NO_BLOCK, dtype=np.int32)
        self.versions = np.zeros(max_num_seqs, dtype=np.int64)
        self.gpu_blocks = BlockPool(num_gpu_blocks, first=1)
        self.lifetimes: BlockLifetimes | None = None
        self.rows_without_tail: set[int] = set()

    @property
    def is_offload(self) -> bool:
        """Whether the mode is offload mode."""
        return self.lifetimes is not None

    def home(self) -> tuple[np.ndarray, BlockPool]:
        """Return the table and pool in which full blocks lie, and are published, in this mode."""
        if self.is_offload:
            return self.host, self.lifetimes.host_blocks
        return self.gpu, self.gpu_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of so many tokens."""
        return -(-num_tokens // self.block_size)


def present(row: np.ndarray) -> list[int]:
    """Return the blocks in a part of a table."""
    return row[row != NO_BLOCK].tolist()
