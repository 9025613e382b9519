"""Equal beginnings share blocks: full blocks of prompts are published under a key made of all tokens up to their end.

A beginning ends at a multiple of the largest blocks' tokens: there, blocks of all groups are full.

Blocks that decode wrote belong to their sequence alone: its attention rounds otherwise than that of prefill, so an
answer that began with them would differ from one that begins with nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanoinfer.kv.snapshots import Snapshots
from nanoinfer.kv.tables import BlockTables, present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK
from offload import BlockPool


class Hits(NamedTuple):
    """A beginning that was found: the blocks that whoever goes on behind it needs of each group.

    Attributes:
        end: tokens of the beginning.
        places: for each group the logical blocks that are needed.
        blocks: these in the home tier; None: it has evicted that one.
        below: these in the host tier, where the home tier has none and is not that one.
        state: host blocks with the states behind the beginning, if layers keep some.
        num_known: tokens of a beginning whose blocks are known, be its states or not.
    """

    end: int
    places: list[range]
    blocks: list[list[int | None]]
    below: list[list[int | None]]
    state: list[int] = []
    num_known: int = 0

    def let_go(self, tables: BlockTables) -> None:
        """Give back what `PrefixCache.find` has taken up."""
        (_, pool), host_blocks = tables.home, tables.lifetimes.host_blocks
        for blocks, below in zip(self.blocks, self.below, strict=True):
            pool.release(taken(blocks))
            host_blocks.release(taken(below))
        host_blocks.release(self.state)


def taken(blocks: Iterable[int | None]) -> list[int]:
    """Return the blocks that are there."""
    return [block for block in blocks if block is not None]


class PrefixCache:
    """Finds and publishes the full blocks of sequences in the pool in which they lie (`BlockTables.home`).

    Args:
        is_enabled: if False, nothing is published, and so nothing is found.
        end_token_ids: with which messages end in a prompt.

    Attributes:
        snapshots: the states of beginnings; None: no layer keeps any, or nothing is published.
        unit: tokens at whose multiples a beginning ends that can be found.
        num_queried_tokens: tokens of the prompts admitted so far that were looked up.
        num_hit_tokens: those of them that were found.
    """

    def __init__(self, tables: BlockTables, is_enabled: bool, end_token_ids: Iterable[int] = ()) -> None:
        self._tables, self._is_enabled = tables, is_enabled
        self.snapshots = Snapshots(tables, end_token_ids) if is_enabled and tables.blocks_of_state else None
        self.unit = tables.block_size if self.snapshots is None else self.snapshots.unit
        self._largest, self._smallest = tables.block_size, min(group.block_size for group in tables.groups)
        self.num_queried_tokens = self.num_hit_tokens = 0

    def find(self, sequence: Sequence, is_cold: bool = False) -> Hits:
        """Take up and return the published blocks of the longest known prefix. At least one token stays to compute.

        is_cold: find nothing.
        """
        (_, pool), below = self._tables.home, self._below
        end, num_known = (0, 0) if is_cold else self._longest(sequence)
        places = [self.needs(number, end) for number in range(len(self._tables.groups))]
        keys = [[self._key(sequence, number, place) for place in needed] for number, needed in enumerate(places)]
        blocks = [[pool.lookup(key) for key in of_group] for of_group in keys]
        lacking = [
            [None if block is not None else below.lookup(key) for key, block in zip(*both, strict=True)]
            for both in zip(keys, blocks, strict=True)
        ]
        state = self.snapshots.find(self._digest(sequence, end)) if end and self.snapshots else []
        return Hits(end, places, blocks, lacking, state, num_known)

    @property
    def _below(self) -> BlockPool | None:
        """The pool that has what the home tier has evicted, in resident mode."""
        below = self._tables.lifetimes.host_blocks
        return None if self._tables.home[1] is below or not below.key_of else below

    def needs(self, number: int, end: int) -> range:
        """Return the blocks of a group that whoever goes on behind `end` tokens needs: all, or those in the window."""
        group = self._tables.groups[number]
        return range(group.first_needed(end), end // group.block_size)

    def num_found(self, sequence: Sequence) -> int:
        """Return how many tokens the longest known prefix has. Takes no block up."""
        return self._longest(sequence, is_quick=True)[0]

    def _longest(self, sequence: Sequence, is_quick: bool = False) -> tuple[int, int]:
        """Return as `num_found`, and how many there would be if states and windows did not count.

        is_quick: of a beginning the end is taken to have gone first.
        """
        if not self._may_find(sequence):
            return 0, 0
        tables, largest = self._tables, self._largest
        ends = range(largest, sequence.num_tokens, largest)  # at least one token stays to compute
        whole = [number for number in range(len(tables.groups)) if number not in tables.windowed]

        def lacks(end: int) -> bool:
            """Whether a block is missing of the last stretch before this end."""
            for number in whole:
                size = tables.groups[number].block_size
                places = range((end - largest) // size, end // size)
                if not all(self._is_known(sequence, number, place) for place in places):
                    return True
            return False

        if is_quick and self._below is None:
            end = largest * bisect_left(ends, True, key=lacks)
        else:
            end = next((end - largest for end in ends if lacks(end)), len(ends) * largest)
        num_known = end
        while end:
            if not self.has_state(sequence, end):
                end -= largest
                continue
            lacking = [
                place * tables.groups[number].block_size
                for number in tables.windowed
                for place in self.needs(number, end)
                if not self._is_known(sequence, number, place)
            ]
            if not lacking:
                return end, num_known
            end = max(lacking) // largest * largest  # an end between needs the missing block, too
        return 0, num_known

    def has_state(self, sequence: Sequence, end: int) -> bool:
        """Whether the states behind a beginning are known, or none are needed."""
        if self.snapshots is None:
            return True
        return end % self.snapshots.unit == 0 and self.snapshots.is_known(self._digest(sequence, end))

    def _is_known(self, sequence: Sequence, number: int, place: int) -> bool:
        key, below = self._key(sequence, number, place), self._below
        return self._tables.home[1].published(key) is not None or below is not None and below.published(key) is not None

    def is_coming(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence is about to compute the first block of a waiting one that cannot be found yet; or
        a state that it could go on from."""
        if sequence.row is not None or sequence.kept_blocks is not None or not self._may_find(sequence):
            return False
        if self.snapshots is not None:
            num_found = self.num_found(sequence)
            ends = ((one, end) for one in running for end in one.snapshot_ends if num_found < end < sequence.num_tokens)
            return any(self._digest(one, end) == self._digest(sequence, end) for one, end in ends)
        end = self.num_found(sequence) + self._largest
        if end >= sequence.num_tokens:
            return False
        digest = self._digest(sequence, end)
        coming = (one for one in running if one.num_published < end <= len(one.prompt_token_ids))
        return any(self._digest(one, end) == digest for one in coming)

    def key_behind(self, sequence: Sequence, end: int) -> bytes | None:
        """Return a key that is published with what comes next behind the tokens that `find` found; None: nothing may
        be shared there."""
        if not self._may_find(sequence) or end + self._largest >= sequence.num_tokens:
            return None
        return _content(self._digest(sequence, end + self._largest), 0)

    def begin(self, sequence: Sequence, end: int, num_known: int) -> None:
        """Count an admitted sequence of which the first `end` tokens were found, and so are published already.

        num_known: as in `Hits`.
        """
        sequence.num_published = end
        if self.snapshots is not None:
            self.snapshots.plan(sequence, end, num_known)
        if self._may_find(sequence) and not sequence.is_ahead:
            table, pool = self._tables.home
            for number, group in enumerate(self._tables.groups):
                pool.note_wanted(present(table[number, sequence.row, : end // group.block_size]))
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += end

    def _may_find(self, sequence: Sequence) -> bool:
        """Whether a sequence is looked up: log-probabilities of a prompt are made where all of it is computed."""
        return self._is_enabled and sequence.num_prompt_logprobs is None

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks of an admitted sequence that prefill has computed, for equal beginnings to share."""
        (table, pool), known = self._tables.home, self._num_known(sequence)
        for number, group in enumerate(self._tables.groups):
            places = range(sequence.num_published // group.block_size, known // group.block_size)
            for place, block in zip(places, table[number, sequence.row, places.start : places.stop].tolist()):
                if block != NO_BLOCK:
                    pool.publish(block, self._key(sequence, number, place))
        sequence.num_published = max(sequence.num_published, known)

    def _num_known(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence prefill has computed, for others to find."""
        return min(sequence.num_computed, len(sequence.prompt_token_ids)) if self._is_enabled else 0

    def publish_state(self, sequence: Sequence, end: int, blocks: list[int]) -> None:
        """Publish the state behind tokens that prefill has computed of a sequence, which held blocks will have."""
        self.snapshots.publish(self._digest(sequence, end), blocks)

    def renew_states(self, sequence: Sequence) -> None:
        """Have the states behind a sequence's beginnings evicted after its blocks, which it gives back."""
        if self.snapshots is not None:
            for end in range(self.snapshots.unit, self._num_known(sequence) + 1, self.snapshots.unit):
                self.snapshots.renew(self._digest(sequence, end))

    def content(self, sequence: Sequence, number: int, place: int) -> bytes | None:
        """Return what a block of a group holds that prefill has computed for a sequence; None: nobody else has it."""
        is_known = (place + 1) * self._tables.groups[number].block_size <= self._num_known(sequence)
        return self._key(sequence, number, place) if is_known else None

    def publish_again(self, sequence: Sequence) -> None:
        """Publish all of its full blocks: they lie in another pool than before, or in other blocks."""
        sequence.num_published = 0
        self.publish(sequence)

    def _key(self, sequence: Sequence, number: int, place: int) -> bytes:
        """Return what a block of a group holds."""
        return _content(self._digest(sequence, (place + 1) * self._tables.groups[number].block_size), number)

    def _digest(self, sequence: Sequence, end: int) -> bytes:
        """Return the digest of the first `end` tokens, a multiple of the smallest blocks': made of their last ones, and
        of the digest before these."""
        digests = sequence.digests
        size = self._smallest
        while len(digests) * size < end:
            begin = len(digests) * size
            tokens = np.asarray(sequence.token_ids[begin : begin + size], dtype=np.int32).tobytes()
            digests.append(hashlib.blake2b((digests[-1] if digests else b"") + tokens, digest_size=16).digest())
        return digests[end // size - 1]

    def end_blocks(self, sequence: Sequence, number: int) -> range:
        """Return the blocks of a group that the next turn needs: those before the last published end of the prompt."""
        return self.needs(number, len(sequence.prompt_token_ids) // self._largest * self._largest)


def _content(digest: bytes, number: int) -> bytes:
    """Return what a block of a group holds, given the digest of all tokens up to its end."""
    return digest + bytes([number])
