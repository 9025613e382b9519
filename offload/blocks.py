"""A pool of numbered blocks: who holds which, which may be shared, and which are cached for reuse.

Holding and publishing are one class, because they are one state: whether a block that nobody holds is free or cached
depends on its key, and whether a key still leads to a block depends on who was handed the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, islice, takewhile

from offload.free_blocks import FreeBlocks

GPU, HOST, STATES = "gpu", "host", "states"
"""The pools by name: GPU memory, host memory, and the slots on the GPU for what sequences keep besides blocks."""


class BlockPool:
    """Reference-counted block numbers with a cache of released blocks.

    The pool knows numbers only, not memory. A block is *free* (content worthless), *held* (reference count above 0) or
    *cached*: nobody holds it, but its content is published under a key and can be taken up again until the room is
    needed. The least recently released block is evicted first; of blocks released together, the last one, because a
    prefix is of no use without its beginning. The lowest free number is handed out first, of each group of layers in
    stretches of its own (`FreeBlocks`), so that blocks tend to be neighbours, which lets one copy move several.

    Args:
        num_blocks: how many block numbers there are.
        first: the first number handed out; lower ones are reserved for the owner (a scratch block).
        stretch: as for `FreeBlocks`.

    Attributes:
        num_leaving: blocks all of whose holders are about to give them back (`give_back_later`). Counted as they come
            and go: it is asked for again and again, and there may be tens of thousands.
        holders: how many hold each block that somebody holds.
        key_of: the key of each published block.
    """

    def __init__(self, num_blocks: int, first: int = 0, stretch: int | None = None) -> None:
        assert 0 <= first <= num_blocks
        self.first, self._num_blocks, self._stretch = first, num_blocks, stretch
        self._free = FreeBlocks(stretch)
        self._free.add(range(first, num_blocks))
        self.holders: dict[int, int] = {}
        self._returning: dict[int, int] = {}  # how many of them are about to give the block back
        self._num_references = self.num_leaving = 0
        self.key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # those cached ones that are evicted before others
        self._wanted: set[int] = set()  # published blocks that were asked for
        self._spent: set[int] = set()  # held blocks that are evicted before others once nobody holds them

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool can hand out in all."""
        return self._num_blocks - self.first

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self.holders)

    @property
    def num_shared(self) -> int:
        """References beyond the first one of each block."""
        return self._num_references - len(self.holders)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can be taken up again."""
        return len(self._cached) + len(self._passed)

    @property
    def num_returning(self) -> int:
        """Blocks that can be handed out once all who are about to give them back have done so, and not yet."""
        return self.num_leaving

    @property
    def num_unwanted(self) -> int:
        """Blocks that can be handed out before any that was asked for since it was published."""
        return len(self._free) + sum(1 for _ in takewhile(lambda block: block not in self._wanted, self._in_order()))

    def _in_order(self) -> Iterator[int]:
        """Return the cached blocks, those that are evicted first before others."""
        return chain(self._passed, self._cached)

    def note_spent(self, blocks: Iterable[int]) -> None:
        """Note that the one holder of each block does not need it any more: it is evicted before others, once it is
        given back, but if it was asked for or is shared.
        """
        self._spent.update(block for block in blocks if self.holders.get(block) == 1 and block not in self._wanted)

    def renew(self, block: int) -> None:
        """Have a cached block evicted after all that are cached now."""
        if self._uncache(block):
            self._cached[block] = None

    def _uncache(self, block: int) -> bool:
        """Take a block from those that are cached, if it is one; return whether it is."""
        is_cached = block in self._cached or block in self._passed
        self._cached.pop(block, None)
        self._passed.pop(block, None)
        return is_cached

    @property
    def num_spare(self) -> int:
        """Blocks that can be handed out with nothing evicted but what was spent when it was given back."""
        return len(self._free) + len(self._passed)

    def note_wanted(self, blocks: Iterable[int]) -> None:
        """Note that published blocks were asked for."""
        self._wanted.update(blocks)

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Hand out `count` blocks with undefined content to a group of layers, evicting cached ones if need be.

        Raises:
            MemoryError: fewer than `count` blocks are free; nothing changes then.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.take(group)
            else:
                block = self._evict()
            self.holders[block] = 1
            blocks.append(block)
        self._num_references += count
        return blocks

    def _evict(self) -> int:
        """Take the cached block that is wanted least: the one place where content is lost that could be found."""
        block, _ = (self._passed or self._cached).popitem(last=False)
        self._forget(block)
        return block

    def next_evicted(self, count: int) -> list[int]:
        """Return the cached blocks that go first, up to `count` of them, the first one first."""
        return list(islice(self._in_order(), count))

    def put_first(self, blocks: Iterable[int]) -> None:
        """Have those of the blocks that are cached go first, the first of them first of all."""
        for block in reversed(list(blocks)):
            if self._uncache(block):
                self._passed[block] = None
                self._passed.move_to_end(block, last=False)

    def lookup(self, key: Hashable) -> int | None:
        """Take up the block published under `key` and hold it, or return None."""
        block = self._block_of.get(key)
        if block is not None:
            self.hold(block)
        return block

    def hold(self, block: int) -> None:
        """Add a reference to a held or cached block."""
        is_cached = self._uncache(block)
        assert is_cached or block in self.holders, f"block {block} is not held or cached"
        self.num_leaving -= self.is_leaving(block)
        self.holders[block] = self.holders.get(block, 0) + 1
        self._num_references += 1

    def published(self, key: Hashable) -> int | None:
        """Return the block published under `key`, or None, without holding it."""
        return self._block_of.get(key)

    def key(self, block: int) -> Hashable | None:
        """Return the key under which the block is published, or None."""
        return self.key_of.get(block)

    def forget(self, key: Hashable) -> None:
        """Withdraw `key`: nobody finds the block published under it any more. If the block was cached, it is free."""
        block = self.published(key)
        if block is None:
            return
        self._forget(block)
        if self._uncache(block):
            self._free.put(block)

    def publish(self, block: int, key: Hashable) -> None:
        """Offer the content of a held block under `key`; the first block stays that somebody holds."""
        assert block in self.holders, f"block {block} is not held"
        if block not in self.key_of and self._block_of.get(key, block) not in self.holders:
            self.forget(key)  # two would have the same content
        if key not in self._block_of and block not in self.key_of:
            self._block_of[key] = block
            self.key_of[block] = key

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Give back one reference to each block. The last one frees the block, or keeps it cached if it is published.

        Args:
            blocks: blocks of one sequence, in their order.

        Returns:
            The blocks that became free, whose content nobody can reach any more.
        """
        freed = []
        for block in reversed(list(blocks)):
            count = self.holders[block] - 1
            self._num_references -= 1
            if count:
                self.holders[block] = count
                self.num_leaving += self.is_leaving(block)
                continue
            del self.holders[block]
            if self._vacate(block):
                freed.append(block)
            self._spent.discard(block)
        return freed

    def _vacate(self, block: int) -> bool:
        """Take back a block that nobody holds any more; return whether its content is worthless."""
        if block in self.key_of:
            (self._passed if block in self._spent else self._cached)[block] = None
            return False
        self._free.put(block)
        return True

    def give_back_later(self, blocks: Iterable[int]) -> list[int]:
        """Note that one holder of each block is about to give it back, in `give_back`; return those that leave then."""
        leaving = []
        for block in blocks:
            self._returning[block] = self._returning.get(block, 0) + 1
            if self.is_leaving(block):
                self.num_leaving += 1
                leaving.append(block)
        return leaving

    def give_back(self, blocks: Iterable[int]) -> list[int]:
        """Release blocks that `give_back_later` has named; return as `release` does."""
        blocks = list(blocks)
        for block in blocks:
            self.num_leaving -= self.is_leaving(block)
            count = self._returning.pop(block) - 1
            if count:
                self._returning[block] = count
        return self.release(blocks)

    def is_leaving(self, block: int) -> bool:
        """Whether somebody holds the block, and all who do are about to give it back."""
        count = self._returning.get(block)
        return count is not None and count == self.holders.get(block)

    def grow(self, count: int) -> None:
        """Add `count` free blocks, with the next higher numbers."""
        first, self._num_blocks = self._num_blocks, self._num_blocks + count
        self._free.add(range(first, self._num_blocks))

    def references(self, block: int) -> int:
        """Return the reference count of the block."""
        return self.holders.get(block, 0)

    def num_staying(self, block: int) -> int:
        """Return how many hold the block and are not about to give it back."""
        return self.holders.get(block, 0) - self._returning.get(block, 0)

    def rebuild(self, held: Iterable[int], keeps_key: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Rebuild the pool after an exception at any point.

        Args:
            held: the blocks that are held; each occurrence is one reference.
            keeps_key: whether the block under a key stays published. Only a block that was held or cached, and to which
                its key leads, can stay so. A block that was being published, taken up or handed out is free.
        """
        references: dict[int, int] = {}
        for block in held:
            references[block] = references.get(block, 0) + 1
        key_of: dict[int, Hashable] = {}
        for block in [*self._in_order(), *self.holders]:
            key = self.key_of.get(block)
            if key is not None and self._block_of.get(key) == block and keeps_key(key):
                key_of[block] = key
        self.key_of, self._block_of = key_of, {key: block for block, key in key_of.items()}
        self._cached = OrderedDict.fromkeys(block for block in key_of if block not in references)
        self._wanted &= key_of.keys()
        self._spent, self._passed = set(), OrderedDict()
        known = references.keys() | key_of.keys()
        self._free = FreeBlocks(self._stretch)
        self._free.add(range(self.first, self._num_blocks), known)
        self.holders, self._num_references = references, sum(references.values())
        self._returning, self.num_leaving = {}, 0

    def _forget(self, block: int) -> None:
        del self._block_of[self.key_of.pop(block)]
        self._wanted.discard(block)
