"""The size of a KV block: the unit that both pools hold and the link carries."""

from __future__ import annotations

from dataclasses import dataclass

Pairs = list[tuple[int, int]]
"""(GPU block, host block) of each block that is copied."""
Places = tuple[int, int] | None
"""The first place of a block that is copied, and the one behind the last; None: all."""


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Sizes of the KV cache, shared by the GPU pool, the host pool and the ring.

    A block holds consecutive tokens of one sequence, `KVGroup.block_size` of them, for the layers of a group, of which
    each has a *place* in it. Its part for one layer is `part_bytes` neighbouring bytes: one copy moves it, and
    neighbouring blocks of a place lie next to each other, so a run of blocks moves in one copy as well. What the bytes
    mean is for those to know who compute with them.

    Attributes:
        part_bytes: of one block in one layer, the least that crosses the link at a time.
    """

    num_places: int
    part_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all places."""
        return self.num_places * self.part_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Shape of a pool, in bytes: `[num_places, num_blocks, part_bytes]`."""
        return (self.num_places, num_blocks, self.part_bytes)


def runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join (destination, source) block pairs into runs `(destination, source, count)` that one copy can move.

    Every copy call costs CPU time and, below about 1 MiB, link time; the driver never joins neighbours by itself.
    """
    joined: list[tuple[int, int, int]] = []
    for destination, source in pairs:
        if joined:
            first_destination, first_source, count = joined[-1]
            if (destination, source) == (first_destination + count, first_source + count):
                joined[-1] = (first_destination, first_source, count + 1)
                continue
        joined.append((destination, source, 1))
    return joined
