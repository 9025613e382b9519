"""Which sequences are let in: room, promises, equal beginnings, and what an earlier refusal still says."""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.mover import Mover
from nanoinfer.requests.sequence import Sequence


def never(sequence: Sequence) -> bool:
    return False


class Admission:
    """Gives sequences their rows.

    Args:
        max_splits: blocks that all rows together may attend to; a shared block counts once for each of its rows.
        only_if_faster: in offload mode, a sequence whose blocks find no room on the GPU is admitted only if that does
            not lower the tokens per second of all sequences together.
    """

    def __init__(self, cache: KVCache, mover: Mover, *, max_splits: int, only_if_faster: bool) -> None:
        self.max_splits = max_splits
        self._cache, self._tables, self._mover = cache, cache.tables, mover
        self._only_if_faster = only_if_faster
        # Says whether a sequence is the newest that was refused, and need not be tried again.
        self._is_refused: Callable[[Sequence], bool] = never

    def forget(self) -> None:
        """Forget the last refusal: the mode or the pools have changed."""
        self._is_refused = never

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row and its blocks (resident) or a promise of them (offload), if there is room.

        Take up the blocks of an equal prefix, or bring back the KV that was kept when the sequence gave way; the caller
        forgets what is kept once the sequence counts as running. Return False, with nothing changed, if there is no
        room.
        """
        if not self._cache.free_rows:
            return False
        # Rows that share blocks need few blocks, but attend to as many splits as others.
        if self._cache.num_reserved_splits + self._tables.num_blocks(sequence.max_num_tokens) > self.max_splits:
            return False
        if sequence.kept_blocks is not None:
            return self._admit_kept(sequence)
        if self._is_refused(sequence):
            return False
        hits = self._admit_resident(sequence) if not self._tables.is_offload else self._admit_offload(sequence)
        if hits is None:
            return False
        self._cache.begin(sequence, len(hits))
        return True

    def _admit_resident(self, sequence: Sequence) -> list[int] | None:
        """Return the blocks of the sequence's prefix that were found, or None if there is no room."""
        hits = self._cache.prefixes.find(sequence)
        missing = self._tables.num_blocks(sequence.num_tokens) - len(hits)
        if missing > self._tables.gpu_blocks.num_free:
            self._refuse(sequence, hits, missing - self._tables.gpu_blocks.num_free)
            return None
        row = self._cache.take_row(sequence)
        blocks = hits + self._tables.gpu_blocks.allocate(missing)
        self._tables.gpu[row, : len(blocks)] = blocks
        return hits

    def _admit_offload(self, sequence: Sequence) -> list[int] | None:
        """Promise every host block that the sequence can ever fill, so that it is never preempted later.

        Return the same as `_admit_resident`.
        """
        if self._cache.copies.num_obtainable < 1:
            return None
        hits = self._cache.prefixes.find(sequence)
        reserve = sequence.max_num_tokens // self._tables.block_size - len(hits)
        num_short, num_own = reserve - self._cache.num_unpromised_host, self._num_own_blocks(sequence, hits)
        if num_short > 0 or not self._keeps_throughput(num_own):
            self._refuse(sequence, hits, max(1, num_short), num_own if num_short <= 0 else None)
            return None
        row = self._cache.take_row(sequence)
        self._tables.host[row, : len(hits)] = hits
        self._cache.reserve_host(sequence, reserve)
        copies = self._cache.copies.find(hits)
        self._tables.gpu[row, len(hits) - len(copies) : len(hits)] = copies
        self._cache.copies.note(row, first=len(hits) - len(copies), num_computed=len(hits) * self._tables.block_size)
        self._cache.copies.promise_tail(row)
        self._cache.copies.limit()
        return hits

    def _refuse(self, sequence: Sequence, hits: list[int], num_short: int, num_own: int | None = None) -> None:
        """Give back the prefix that was found. Remember what must change first: looking the prefix up takes long.

        Args:
            num_short: how many blocks must be given back for there to be room.
            num_own: number of the sequence's blocks that no running sequence had, if there was room but the sequence
                would have slowed the running ones; None if there was no room.
        """
        cache, next_key = self._cache, self._cache.prefixes.key_behind(sequence, len(hits))
        _, pool = self._tables.home
        pool.release(hits)
        room_from = cache.num_given_back + num_short

        def is_refused(other: Sequence) -> bool:
            if other is not sequence or pool is not self._tables.home[1] or cache.num_given_back >= room_from:
                return False
            if next_key is not None and pool.published(next_key) is not None:
                return False  # more of the prefix is known
            return num_own is None or not self._keeps_throughput(num_own)

        self._is_refused = is_refused

    def _num_own_blocks(self, sequence: Sequence, hits: list[int]) -> int:
        """Return the number of the sequence's blocks that no running one has.

        Host blocks that it shares with a running sequence need no further room, and stream once for all.
        """
        num_shared = int((self._tables.host[:, : len(hits)] == hits).any(axis=0).sum())
        return self._tables.num_blocks(sequence.num_tokens) - num_shared

    def _keeps_throughput(self, num_blocks: int) -> bool:
        """Whether one more sequence, with `num_blocks` blocks of its own, does not lower the tokens per second of all.

        A step of n sequences that streams s blocks takes about s / link. With one more sequence of b blocks, for which
        the GPU has no room, (n + 1) / (s + b) >= n / s holds where b <= s / n: the bandwidth need not be known.
        """
        if not self._only_if_faster or num_blocks <= self._cache.copies.gpu_room:
            return True
        num_running = len(self._tables.gpu) - len(self._cache.free_rows)
        return num_running == 0 or num_blocks * num_running <= self._cache.copies.num_streamed

    def _admit_kept(self, sequence: Sequence) -> bool:
        """Admit a sequence that gave way. Return False, with nothing changed, if there is no room."""
        cache, tables, mover = self._cache, self._tables, self._mover
        if tables.is_offload:
            needed, num_full = sequence.max_num_tokens // tables.block_size, sequence.num_computed // tables.block_size
            has_room = cache.copies.num_obtainable >= 1 and needed <= cache.num_unpromised_host
            if not has_room or not self._keeps_throughput(tables.num_blocks(sequence.num_tokens)):
                return False
            cache.reserve_host(sequence, needed - num_full)
        else:
            # One block to spare for each running row, or the sequence would have to give way again at once.
            num_running = len(tables.gpu) - len(cache.free_rows)
            if mover.num_missing(sequence) + num_running > tables.gpu_blocks.num_free:
                return False
        cache.take_row(sequence)
        mover.bring_back(sequence)
        cache.prefixes.publish_again(sequence)
        return True
