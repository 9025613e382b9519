"""Equal beginnings share blocks: full blocks of prompts are published under a key made of all tokens up to their end.

Blocks that decode wrote belong to their sequence alone: its attention rounds otherwise than that of prefill, so an
answer that began with them would differ from one that begins with nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanoinfer.kv.tables import BlockTables, present
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK
from offload import BlockPool


class Hits(NamedTuple):
    """A beginning that was found: what whoever goes on behind so many blocks needs of each group.

    Attributes:
        blocks: of the home tier; None: it has evicted that one.
        below: of the host tier, where the home tier has none and is not that one.
    """

    end: int
    blocks: list[list[int | None]]
    below: list[list[int | None]]


def taken(blocks: Iterable[int | None]) -> list[int]:
    """Return the blocks that are there."""
    return [block for block in blocks if block is not None]


class PrefixCache:
    """Finds and publishes the full blocks of sequences in the pool in which they lie (`BlockTables.home`).

    Args:
        is_enabled: if False, nothing is published, and so nothing is found.

    Attributes:
        num_queried_tokens: tokens of the prompts admitted so far that were looked up.
        num_hit_tokens: those of them that were found.
    """

    def __init__(self, tables: BlockTables, is_enabled: bool) -> None:
        self._tables, self._block_size, self._is_enabled = tables, tables.block_size, is_enabled
        self.num_queried_tokens = self.num_hit_tokens = 0

    def find(self, sequence: Sequence) -> Hits:
        """Take up and return the published blocks of the longest known prefix. At least one token stays to compute."""
        end, (_, pool), below = self._longest(sequence), self._tables.home, self._below
        keys = [
            [content_key(sequence.block_keys[place], number) for place in self.needs(number, end)]
            for number in range(len(self._tables.groups))
        ]
        blocks = [[pool.lookup(key) for key in of_group] for of_group in keys]
        lacking = [
            [None if block is not None else below.lookup(key) for key, block in zip(*both, strict=True)]
            for both in zip(keys, blocks, strict=True)
        ]
        return Hits(end, blocks, lacking)

    @property
    def _below(self) -> BlockPool | None:
        """The pool that has what the home tier has evicted, in resident mode."""
        below = self._tables.lifetimes.host_blocks
        return None if self._tables.home[1] is below or not below.key_of else below

    def needs(self, number: int, end: int) -> range:
        """Return the blocks of a group that whoever goes on behind `end` blocks needs: all, or those in the window."""
        return range(self._tables.groups[number].first_needed(end * self._block_size), end)

    def find_below(self, sequence: Sequence, num_hits: int) -> list[int]:
        """Take up and return, in resident mode, host blocks with what comes next behind the hits that `find` found."""
        below = self._tables.lifetimes.host_blocks
        if self._tables.home[1] is below or not below.key_of or not self._may_find(sequence):
            return []
        found = []
        for key in self._keys(sequence, (sequence.num_tokens - 1) // self._block_size)[num_hits:]:
            block = below.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_found(self, sequence: Sequence) -> int:
        """Return how many blocks the longest known prefix has. Takes none up."""
        return self._longest(sequence, is_quick=True)

    def _longest(self, sequence: Sequence, is_quick: bool = False) -> int:
        """Return as `num_found`; is_quick: of a beginning the end is taken to have gone first."""
        if not self._may_find(sequence):
            return 0
        keys, tables = self._keys(sequence, (sequence.num_tokens - 1) // self._block_size), self._tables
        whole = [number for number in range(len(tables.groups)) if number not in tables.windowed]

        def lacks(key: bytes) -> bool:
            return not all(self._is_known(key, number) for number in whole)

        if is_quick and self._below is None:
            end = bisect_left(keys, True, key=lacks)
        else:
            end = next((place for place, key in enumerate(keys) if lacks(key)), len(keys))
        while end:
            places = ((place, number) for number in tables.windowed for place in self.needs(number, end))
            lacking = [place for place, number in places if not self._is_known(keys[place], number)]
            if not lacking:
                return end
            end = max(lacking)  # an end between needs the missing block, too
        return 0

    def _is_known(self, key: bytes, number: int) -> bool:
        key, below = content_key(key, number), self._below
        return self._tables.home[1].published(key) is not None or below is not None and below.published(key) is not None

    def is_coming(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence is about to compute the first block of a waiting one that cannot be found yet."""
        if sequence.row is not None or sequence.kept_blocks is not None or not self._may_find(sequence):
            return False
        place = self.num_found(sequence)
        if place == (sequence.num_tokens - 1) // self._block_size:
            return False
        key = sequence.block_keys[place]
        return any(one.num_published <= place < len(one.block_keys) and one.block_keys[place] == key for one in running)

    def key_behind(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """Return the key of the first block that `find` did not find, or None if it found all that may be shared."""
        if not self._may_find(sequence) or num_hits == (sequence.num_tokens - 1) // self._block_size:
            return None
        return content_key(self._keys(sequence, num_hits + 1)[-1], 0)

    def begin(self, sequence: Sequence, num_hits: int) -> None:
        """Count an admitted sequence of which `num_hits` blocks were found, and so are published already."""
        sequence.num_published = num_hits
        if self._may_find(sequence) and not sequence.is_ahead:
            table, pool = self._tables.home
            pool.note_wanted(present(table[:, sequence.row, :num_hits]))
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += num_hits * self._block_size

    def _may_find(self, sequence: Sequence) -> bool:
        """Whether a sequence is looked up: log-probabilities of a prompt are made where all of it is computed."""
        return self._is_enabled and sequence.num_prompt_logprobs is None

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks of an admitted sequence that prefill has computed, for equal beginnings to share."""
        (table, pool), contents = self._tables.home, self.contents(sequence)
        for s in range(sequence.num_published, len(contents)):
            for number, block in enumerate(table[:, sequence.row, s].tolist()):
                if block != NO_BLOCK:
                    pool.publish(block, content_key(contents[s], number))
        sequence.num_published = len(contents)

    def contents(self, sequence: Sequence) -> list[bytes]:
        """Return what the full blocks hold that prefill has computed for a sequence, in their order."""
        known = min(sequence.num_computed, len(sequence.prompt_token_ids)) // self._block_size
        return self._keys(sequence, known) if self._is_enabled else []

    def publish_again(self, sequence: Sequence) -> None:
        """Publish all of its full blocks: they lie in another pool than before, or in other blocks."""
        sequence.num_published = 0
        self.publish(sequence)

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the keys of the first `count` logical blocks, each a digest of its tokens and of the key before it."""
        keys = sequence.block_keys
        while len(keys) < count:
            begin = len(keys) * self._block_size
            tokens = np.asarray(sequence.token_ids[begin : begin + self._block_size], dtype=np.int32).tobytes()
            keys.append(hashlib.blake2b((keys[-1] if keys else b"") + tokens, digest_size=16).digest())
        return keys[:count]

    def end_blocks(self, sequence: Sequence, number: int) -> range:
        """Return the blocks of a group that the next turn needs: those before the last published end of the prompt."""
        return self.needs(number, len(sequence.prompt_token_ids) // self._block_size)


def content_key(key: bytes, number: int) -> bytes:
    """Return what a block of a group holds, given the digest of all tokens up to its end."""
    return key + bytes([number])
