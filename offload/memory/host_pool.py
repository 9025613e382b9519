"""The host pool: KV blocks in host memory, in segments that become usable one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress

import torch

from offload.layout import KVLayout
from offload.memory.host_memory import memory_available_bytes
from offload.memory.pinned import HostArena, PinError


class HostPool:
    """Memory of blocks on the host. Who holds which block is counted elsewhere (`HostBlocks`).

    Segment g holds `blocks_per_segment` blocks for all layers as `[num_places, blocks_per_segment, part_bytes]` uint8.
    Within a segment, neighbouring blocks of a layer are one contiguous range, so one copy moves a run of them. The last
    segment may hold fewer blocks than the others. A segment is usable as soon as it is pinned, even while later
    segments are not.

    Behind these, pageable memory can be borrowed, where there is none that is pinned: segments of as many blocks as are
    wanted, which are given back with their last block.

    Args:
        max_bytes: the most memory that all blocks may take where some is borrowed; None: as much as the system gives.

    Attributes:
        arena: the memory; None until the pool is needed for the first time.
        num_ahead: segments that are pinned beside the most that were ever wanted.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        blocks_per_segment: int,
        arena: HostArena | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks_per_segment = blocks_per_segment
        self.arena, self.max_bytes, self.num_ahead = arena, max_bytes, 0
        self._num_wanted = 0  # the most segments that were wanted
        self._segments: dict[int, torch.Tensor] = {}
        self._borrowed: dict[int, set[int]] = {}  # segment -> those of its blocks that were not given back

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks; 0 until there is memory."""
        return 0 if self.arena is None else self.num_blocks * self.layout.block_bytes

    @property
    def borrowed_bytes(self) -> int:
        return sum(self._segments[segment].nbytes for segment in self._borrowed)

    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]:
        """Have the first `num_blocks` blocks pinned; wait until they can be used, or it is known that they never can.

        Args:
            may_wait: False: return at once what is known so far.

        Returns:
            How many blocks can be used, none without memory; and, if these are too few, why there will be no more: a
            PinError or a MemoryError.
        """
        if self.arena is None:
            return 0, None
        failure, num_segments = None, -(-num_blocks // self.blocks_per_segment)
        try:
            self.arena.want(num_segments)
            if num_segments > self._num_wanted:
                self._num_wanted = num_segments
                with suppress(MemoryError):
                    self.arena.want(min(num_segments + self.num_ahead, self.arena.num_segments))
        except MemoryError as error:  # there may be more when it is asked for again
            failure = error if may_wait else None
        if failure is not None or not (may_wait or self.arena.has_failed):
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
            `[num_places, count, part_bytes]`.
        """
        found = self._segments.get(segment)
        if found is None:
            self.arena.wait(segment + 1)
            num_blocks = min(self.blocks_per_segment, self.num_blocks - segment * self.blocks_per_segment)
            memory = self.arena.segment(segment)[: num_blocks * self.layout.block_bytes]
            found = self._segments[segment] = memory.view(self.layout.pool_shape(num_blocks))
        return found[:, begin : begin + count]

    def block(self, place: int, block: int) -> torch.Tensor:
        """Return a view of one layer's part of a block, `[part_bytes]`."""
        segment, within = divmod(block, self.blocks_per_segment)
        return self.run(segment, within, 1)[place, 0]

    def borrow(self, count: int) -> list[int]:
        """Take pageable memory for `count` blocks more, and return their numbers.

        Raises:
            MemoryError: the limit or the system does not allow it; nothing changes.
        """
        wanted, what = count * self.layout.block_bytes, "no host memory for the KV of a preempted sequence"
        num_ready = 0 if self.arena is None else min(self.arena.num_ready * self.blocks_per_segment, self.num_blocks)
        taken = self.borrowed_bytes + num_ready * self.layout.block_bytes
        if self.max_bytes is not None and taken + wanted > self.max_bytes:
            raise MemoryError(
                f"{what}: {wanted} more bytes would be above host_memory_limit ({self.max_bytes} bytes, {taken} are "
                "taken): raise it"
            )
        if wanted > (available := memory_available_bytes()):
            raise MemoryError(f"{what}: {wanted} more bytes are wanted, {available} are available: free some memory")
        unused = (i for i in itertools.count(-(-self.num_blocks // self.blocks_per_segment)) if i not in self._borrowed)
        found: dict[int, torch.Tensor] = {}
        try:
            for begin in range(0, count, self.blocks_per_segment):
                shape = self.layout.pool_shape(min(self.blocks_per_segment, count - begin))
                found[next(unused)] = torch.empty(shape, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"{what} ({error})") from error
        numbers = {
            segment: range(segment * self.blocks_per_segment, segment * self.blocks_per_segment + memory.shape[1])
            for segment, memory in found.items()
        }
        self._segments |= found
        self._borrowed |= {segment: set(blocks) for segment, blocks in numbers.items()}
        return [block for blocks in numbers.values() for block in blocks]

    def give_back(self, blocks: Iterable[int]) -> None:
        """Give the memory of borrowed blocks back, which nothing touches any more. Pinned ones stay."""
        for block in blocks:
            segment = block // self.blocks_per_segment
            left = self._borrowed.get(segment)
            if left is not None:
                left.discard(block)
                if not left:
                    del self._borrowed[segment], self._segments[segment]

    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        """Give the memory of all borrowed blocks but these back: after an exception at any point."""
        kept = set(blocks)
        for segment in [*self._segments.keys() - self._borrowed.keys()]:
            if segment * self.blocks_per_segment >= self.num_blocks:
                del self._segments[segment]
        self.give_back([block for left in [*self._borrowed.values()] for block in left if block not in kept])
