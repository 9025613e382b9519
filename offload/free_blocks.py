"""Free block numbers, handed out so that blocks of one group of layers tend to be neighbours.

What streams of a group in a step is its blocks alone, and a copy moves neighbours. Groups that took the lowest number
in turn, as decode makes blocks full, would lie among each other, and each block would be a copy of its own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Container, Iterable


class FreeBlocks:
    """Numbers in *stretches* of neighbours, each of which one group takes from while another is wholly free.

    A group takes the lowest free number of its stretches, else of one that is wholly free and becomes its own, else of
    any other's. So with one stretch, or one group, it is the lowest of all.

    Args:
        stretch: numbers of a stretch; None: all of them are one.
    """

    def __init__(self, stretch: int | None = None) -> None:
        self._stretch = stretch
        self._free: dict[int, list[int]] = defaultdict(list)  # stretch -> a heap
        self._sizes: dict[int, int] = defaultdict(int)  # numbers that each stretch has
        self._owner: dict[int, int] = {}
        # Heaps of stretches, in which those that are so no more stay until they come up.
        self._untouched: list[int] = []
        self._any: list[int] = []
        self._own: dict[int, list[int]] = defaultdict(list)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, blocks: Iterable[int], taken: Container[int] = ()) -> None:
        """Add numbers, of which some are handed out already."""
        blocks = list(blocks)
        for block in blocks:
            self._sizes[self._stretch_of(block)] += 1
        for block in blocks:
            if block not in taken:
                self.put(block)

    def put(self, block: int) -> None:
        """Give back a number."""
        stretch = self._stretch_of(block)
        free = self._free[stretch]
        if not free:
            heapq.heappush(self._any, stretch)
            if stretch in self._owner:
                heapq.heappush(self._own[self._owner[stretch]], stretch)
        heapq.heappush(free, block)
        self._count += 1
        if len(free) == self._sizes[stretch]:
            self._owner.pop(stretch, None)
            heapq.heappush(self._untouched, stretch)

    def take(self, group: int) -> int:
        """Hand out a number to a group; there must be one."""
        stretch = self._lowest(self._own[group], lambda one: self._owner.get(one) == group)
        if stretch is None:
            stretch = self._lowest(self._untouched, lambda one: len(self._free[one]) == self._sizes[one])
            stretch = self._lowest(self._any, lambda one: True) if stretch is None else stretch
            self._owner[stretch] = group
            heapq.heappush(self._own[group], stretch)
        self._count -= 1
        return heapq.heappop(self._free[stretch])

    def _lowest(self, heap: list[int], is_meant: Callable[[int], bool]) -> int | None:
        while heap and not (self._free[heap[0]] and is_meant(heap[0])):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _stretch_of(self, block: int) -> int:
        return 0 if self._stretch is None else block // self._stretch
