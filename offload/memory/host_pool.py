"""The host pool: KV blocks in host memory, in segments that become usable one after the other."""

from __future__ import annotations

import torch

from offload.layout import KVLayout
from offload.memory.pinned import HostArena, PinError


class HostPool:
    """Memory of blocks on the host. Who holds which block is counted elsewhere (`BlockPool`).

    Segment g holds `blocks_per_segment` blocks for all layers as `[num_layers, blocks_per_segment, part_bytes]` uint8.
    Within a segment, neighbouring blocks of a layer are one contiguous range, so one copy moves a run of them. The last
    segment may hold fewer blocks than the others. A segment is usable as soon as it is pinned, even while later
    segments are not.

    Attributes:
        arena: the memory; None until the pool is needed for the first time.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, blocks_per_segment: int, arena: HostArena | None = None
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks_per_segment = blocks_per_segment
        self.arena = arena
        self._segments: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks; 0 until there is memory."""
        return 0 if self.arena is None else self.num_blocks * self.layout.block_bytes

    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]:
        """Wait until the first `num_blocks` blocks can be used, or it is known that they never can.

        Args:
            may_wait: False: return at once what is known so far.

        Returns:
            How many blocks can be used, none without memory; and, if these are too few, why there will be no more: a
            PinError or a MemoryError.
        """
        if self.arena is None:
            return 0, None
        failure, num_segments = None, -(-num_blocks // self.blocks_per_segment)
        if not (may_wait or self.arena.has_failed):
            num_segments = min(num_segments, self.arena.num_ready)
        try:
            self.arena.wait(num_segments)
        except (PinError, MemoryError) as error:
            failure = error
        except Exception as error:
            failure = PinError(f"host memory could not be pinned: {error}")
        return min(self.arena.num_ready * self.blocks_per_segment, self.num_blocks), failure

    def run(self, segment: int, begin: int, count: int) -> torch.Tensor:
        """Return a view of neighbouring blocks of one segment; wait until the segment is pinned.

        Returns:
            `[num_layers, count, part_bytes]`.
        """
        while len(self._segments) <= segment:
            index = len(self._segments)
            self.arena.wait(index + 1)
            num_blocks = min(self.blocks_per_segment, self.num_blocks - index * self.blocks_per_segment)
            memory = self.arena.segment(index)[: num_blocks * self.layout.block_bytes]
            self._segments.append(memory.view(self.layout.pool_shape(num_blocks)))
        return self._segments[segment][:, begin : begin + count]

    def block(self, layer: int, block: int) -> torch.Tensor:
        """Return a view of one layer's part of a block, `[part_bytes]`."""
        segment, within = divmod(block, self.blocks_per_segment)
        return self.run(segment, within, 1)[layer, 0]
