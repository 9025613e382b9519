"""Equal beginnings share blocks: full blocks of prompts are published under a key made of all tokens up to their end.

Blocks that decode wrote belong to their sequence alone: its attention rounds otherwise than that of prefill, so an
answer that began with them would differ from one that begins with nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from nanoinfer.kv.tables import BlockTables
from nanoinfer.requests.sequence import Sequence


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

    def find(self, sequence: Sequence) -> list[int]:
        """Take up and return the published blocks of the longest known prefix. At least one token stays to compute."""
        if not self._may_find(sequence):
            return []
        hits, (_, pool) = [], self._tables.home
        for key in self._keys(sequence, (sequence.num_tokens - 1) // self._block_size):
            block = pool.lookup(key)
            if block is None:
                break
            hits.append(block)
        return hits

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
        """Return how many blocks `find` would find. Takes none up."""
        if not self._may_find(sequence):
            return 0
        keys, (_, pool) = self._keys(sequence, (sequence.num_tokens - 1) // self._block_size), self._tables.home
        return bisect_left(keys, True, key=lambda key: pool.published(key) is None)  # of a beginning the end goes first

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
        return self._keys(sequence, num_hits + 1)[-1]

    def begin(self, sequence: Sequence, num_hits: int) -> None:
        """Count an admitted sequence of which `num_hits` blocks were found, and so are published already."""
        sequence.num_published = num_hits
        if self._may_find(sequence) and not sequence.is_ahead:
            self._tables.home[1].note_wanted(self._tables.home[0][sequence.row, :num_hits].tolist())
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += num_hits * self._block_size

    def _may_find(self, sequence: Sequence) -> bool:
        """Whether a sequence is looked up: log-probabilities of a prompt are made where all of it is computed."""
        return self._is_enabled and sequence.num_prompt_logprobs is None

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks of an admitted sequence that prefill has computed, for equal beginnings to share."""
        (table, pool), contents = self._tables.home, self.contents(sequence)
        for s in range(sequence.num_published, len(contents)):
            pool.publish(int(table[sequence.row, s]), contents[s])
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
