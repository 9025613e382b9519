"""Who holds which pageable block, and which block of the home tier has the same content."""

from __future__ import annotations

from nanoinfer.kv.tables import BlockTables
from offload import BlockPool


class KeptBlocks(BlockPool):
    """Blocks of sequences that gave way. A full one is published under the name of an equal block's content.

    So sequences that shared a block share it again, wherever its content lies when they come back.
    """

    def __init__(self, tables: BlockTables) -> None:
        super().__init__(0)
        self._tables = tables

    def name(self, block: int) -> tuple[bool, int, int]:
        """Return the name of the content of a block of the home tier, once that is complete."""
        _, pool = self._tables.home
        return pool is self._tables.gpu_blocks, *pool.stamped(block)

    def equal_to(self, kept: int) -> int | None:
        """Return the block of the home tier with the content of a kept block that some sequence holds, or None."""
        content, (_, pool) = self.key(kept), self._tables.home
        is_there = content is not None and pool.references(content[1]) and self.name(content[1]) == content
        return content[1] if is_there else None

    def rename(self, copies: dict[int | None, int]) -> None:
        """Name kept blocks after the blocks of the home tier that have their content now: {kept block: block}."""
        for kept, block in copies.items():
            if kept is not None and self.references(kept):
                self.forget(self.key(kept))
                self.publish(kept, self.name(block))
