"""Snapshots: the states of beginnings, kept on the host, where others that begin alike take them up.

The blocks of a beginning do not hold the states of layers without attention, so whoever goes on behind it needs a copy
of these, too. A snapshot is such a copy: some blocks of the host pool, published under the digest of the beginning's
tokens, and evicted as others are. A prefill step that passes an end where one is to be kept (`Snapshots.plan`) leaves
the state there in a slot of its own, and nobody waits for the copy. Where no slot is spare the step ends there, and its
sequence waits until its own state was copied; no other does.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanoinfer.kv.tables import BlockTables
from nanoinfer.models.states import STEP_UNIT
from nanoinfer.requests.sequence import Sequence

# Tokens between two snapshots of a long prompt.
SPACING = 4096
# Messages at the end of a prompt before whose ends a snapshot is kept: what is said before these hardly changes.
LAST_MESSAGES = 3
# Of the host's blocks, the most that snapshots take is one in so many.
SHARE = 4


class StateKey(NamedTuple):
    """What a host block holds: a piece of the state behind the tokens of this digest."""

    digest: bytes
    piece: int


class Snapshots:
    """Finds and publishes the states of beginnings in the host pool.

    Args:
        end_token_ids: with which messages end in a prompt.

    Attributes:
        end_token_ids: as above, a list.
        unit: tokens at whose multiples a beginning with a state can end.
        num_kept: snapshots so far.
    """

    def __init__(self, tables: BlockTables, end_token_ids: Iterable[int] = ()) -> None:
        self._pool, self._num_pieces = tables.lifetimes.host_blocks, tables.blocks_of_state
        self.unit = math.lcm(tables.block_size, STEP_UNIT)
        self.end_token_ids = list(end_token_ids)
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # some of which the pool may have evicted since
        self.num_kept = 0

    def plan(self, sequence: Sequence, num_found: int, num_known: int) -> None:
        """Note behind which of its tokens the state of an admitted sequence is to be kept.

        These are the last multiples of `unit` before the ends of the prompt and of its last messages, and before where
        it parts from what others began with, and one every `SPACING` tokens.

        Args:
            num_found: tokens of the beginning whose state was found.
            num_known: tokens of that whose blocks were found.
        """
        length = len(sequence.prompt_token_ids)
        is_end = np.isin(np.array(sequence.prompt_token_ids), self.end_token_ids)
        of_messages = np.flatnonzero(is_end)[-LAST_MESSAGES:] + 1
        wanted = [length - 1, length, num_known, *of_messages.tolist(), *range(SPACING, length, SPACING)]
        ends = {end // self.unit * self.unit for end in wanted}
        sequence.snapshot_ends = sorted(end for end in ends if end > num_found)

    def take_due(self, sequence: Sequence) -> bool:
        """Whether the state of a sequence is to be kept as it is now; forget the ends that it has come to."""
        left = [end for end in sequence.snapshot_ends if end > sequence.num_computed]
        is_due = sequence.num_computed in sequence.snapshot_ends
        sequence.snapshot_ends = left
        return is_due

    def is_known(self, digest: bytes) -> bool:
        return all(self._pool.published(StateKey(digest, piece)) is not None for piece in range(self._num_pieces))

    def find(self, digest: bytes) -> list[int]:
        """Take up and return the blocks of a snapshot that is known."""
        blocks = [self._pool.lookup(StateKey(digest, piece)) for piece in range(self._num_pieces)]
        self._kept.move_to_end(digest)
        return blocks

    def make_room(self) -> None:
        """Forget those asked for least recently that are more than there may be with one more."""
        most = self._pool.num_possible // SHARE // self._num_pieces
        if len(self._kept) < max(1, most):
            return
        for digest in [digest for digest in self._kept if not self.is_known(digest)]:
            self._forget(digest)
        while len(self._kept) >= max(1, most):
            self._forget(next(iter(self._kept)))

    def publish(self, digest: bytes, blocks: list[int]) -> None:
        """Offer blocks that somebody holds, and in which the state behind these tokens is, or will be."""
        self._forget(digest)  # of which some pieces may be left
        self._kept[digest] = None
        for piece, block in enumerate(blocks):
            self._pool.publish(block, StateKey(digest, piece))
        self.num_kept += 1

    def renew(self, digest: bytes) -> None:
        """Have a snapshot evicted after all that is cached now."""
        for piece in range(self._num_pieces):
            if (block := self._pool.published(StateKey(digest, piece))) is not None:
                self._pool.renew(block)

    def _forget(self, digest: bytes) -> None:
        self._kept.pop(digest, None)
        for piece in range(self._num_pieces):
            self._pool.forget(StateKey(digest, piece))

    def recover(self) -> None:
        """Note what is left, after an exception."""
        self._kept = OrderedDict.fromkeys(key.digest for key in self._pool.key_of.values() if isinstance(key, StateKey))
