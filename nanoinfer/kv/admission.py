"""Which sequences are let in: room, promises, equal beginnings, who is held back and for how long."""

from __future__ import annotations

import enum
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.mover import Mover
from nanoinfer.kv.prefix_cache import Hits, taken
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.plan import NO_BLOCK
from offload.reserve import Prompt, StepReserve

# A waiting sequence is held back for at most as many tries as it has so many tokens to compute. Prefill of some 150 to
# 200 tokens takes as long as a decode step that reads the weights once (a GPU's operations per byte of its memory), so
# a sequence is held for about as long as two or three times its prefill takes.
TOKENS_PER_TRY = 64
# Sequences at the head of the queue that may be held back at a time, while others pass.
MAX_HELD = 4
NO_HITS = Hits(0, [], [], [])


class Verdict(enum.Enum):
    ADMITTED = "admitted"
    REFUSED = "refused"  # there is no room: whoever stands behind waits, too
    HELD_BACK = "held back"  # there is room on the host and none on the GPU: others may pass for a while
    SPILL = "spill"  # as before, but no longer: enter offload mode and try again


@dataclass(frozen=True)
class _Wanted:
    """What a sequence needs to be admitted.

    Attributes:
        num_room: blocks of the home tier, those of its prefix included that nobody holds.
        num_host: host blocks in offload mode that no running sequence has.
        num_own: blocks that no running sequence has.
        num_tokens: tokens that are to be computed.
        next_key: key of the first block that was not found, or None if there is none that may be shared.
    """

    num_room: int
    num_host: int
    num_own: int
    num_tokens: int
    next_key: bytes | None


class Admission:
    """Gives sequences their rows.

    In offload mode that the engine has entered by itself, a sequence that finds no room on the GPU lowers the tokens
    per second of all if it streams much. So it is held back for a while, in either mode, and shorter ones may pass.
    They leave it the room on the host, the row and the splits that it waits for, so that it is admitted afterwards.

    Args:
        tell: warns if offload mode has less host memory than was planned.
        max_splits: blocks that all rows together may attend to; a shared block counts once for each of its rows.
        reserve: what is kept for prefill steps.
        may_spill: whether the engine may enter offload mode by itself, where each sequence finds room that finds it in
            resident mode.
        step_unit: tokens of the smallest chunk that a prompt moves on by, but for its last; 0: one.

    Attributes:
        wanted: what the sequences need that were refused last: looking a prefix up takes long.
    """

    def __init__(
        self,
        cache: KVCache,
        mover: Mover,
        tell: Callable[[], None],
        *,
        max_splits: int,
        reserve: StepReserve,
        may_spill: bool,
        step_unit: int = 0,
    ) -> None:
        self.max_splits, self.may_spill, self._tell, self._reserve = max_splits, may_spill, tell, reserve
        self._cache, self._tables, self._mover = cache, cache.tables, mover
        groups = cache.tables.groups
        # What the smallest chunk wants beside the tails that all rows hold.
        self._unit_blocks = max(0, groups.chunk_blocks(step_unit) - len(groups))
        self.wanted: dict[Sequence, _Wanted] = {}
        self._held: Sequence | None = None  # the head of the queue, if it is held back
        self._num_tries = 0  # for which it is held back yet

    def forget(self) -> None:
        """Forget what was refused: the mode or the pools have changed."""
        self.wanted.clear()

    def num_left(self, sequence: Sequence) -> int:
        """Return how many tokens a waiting sequence would have to compute if it were let in now."""
        num_found = self._cache.prefixes.num_found(sequence) if sequence.kept_blocks is None else 0
        return sequence.num_tokens - max(sequence.num_computed, num_found)

    def admit(
        self,
        sequence: Sequence,
        running: Several[Sequence],
        held: Several[Sequence] = (),
        passed: Several[Sequence] = (),
    ) -> Verdict:
        """Give the sequence a row and its blocks (resident) or a promise of them (offload), if there is room.

        Take up the blocks of an equal prefix, or bring back the KV that was kept when the sequence gave way; the caller
        forgets what is kept once the sequence counts as running. If the sequence is not admitted, nothing has changed.

        Args:
            running: the admitted sequences.
            held: the first of the queue, which are held back.
            passed: those between them and the sequence, which are not asked yet: it has fewer tokens to compute.
        """
        waiting = (*held, *passed, sequence)
        # Rows that share blocks need few blocks, but attend to as many splits as others.
        num_splits = sum(self._tables.num_splits(one.max_num_tokens) for one in waiting)
        if self._cache.num_free_rows < len(waiting) or self._cache.num_reserved_splits + num_splits > self.max_splits:
            return Verdict.REFUSED
        num_tails = (len(running) + len(waiting)) * len(self._tables.groups)
        num_kept = self._num_kept(sequence, running) if running else 0
        if num_kept and num_tails + num_kept > self._tables.gpu_blocks.num_blocks:
            return Verdict.REFUSED  # with one row more prompts might not find room for a chunk
        wanted = self.wanted.get(sequence) if running else None
        if wanted is not None and (wanted.next_key is None or self._tables.home[1].published(wanted.next_key) is None):
            verdict = self._verdict(sequence, wanted, running, held, passed)
            if verdict is not Verdict.ADMITTED:
                return verdict
        self.wanted.pop(sequence, None)
        hits, wanted = self._look(sequence, running)
        verdict = self._verdict(sequence, wanted, running, held, passed)
        if verdict is Verdict.REFUSED and hits.state and not running:
            # What was found fits beside nothing, and nobody is there who would make room: it is computed anew.
            hits, wanted = self._look(sequence, running, is_cold=True)
            verdict = self._verdict(sequence, wanted, running, held, passed)
        if verdict is Verdict.ADMITTED:
            self._take(sequence, hits)
        elif sequence.kept_blocks is None:
            if len(self.wanted) > MAX_HELD:
                self.wanted.clear()  # some may have been aborted
            self.wanted[sequence] = wanted
        return verdict

    def _look(self, sequence: Sequence, running: Several[Sequence], is_cold: bool = False) -> tuple[Hits, _Wanted]:
        """Return the blocks of its prefix that were found, held by nobody on its behalf, and what it needs.

        is_cold: as of `PrefixCache.find`.
        """
        tables, cache, groups = self._tables, self._cache, self._tables.groups
        table, pool = tables.home
        num_blocks, num_full = tables.num_to_begin(sequence), groups.most_full(sequence.max_num_tokens)
        if sequence.kept_blocks is not None:
            # Some to spare for each running row, or the sequence would have to give way again at once.
            num_host, num_spare = self._mover.num_to_fill(sequence), len(running) * len(groups)
            num_room = num_host if tables.is_offload else self._mover.num_missing(sequence) + num_spare
            return NO_HITS, _Wanted(num_room, num_host, num_blocks, sequence.num_tokens - sequence.num_computed, None)
        room, hits = self._room, cache.prefixes.find(sequence, is_cold)
        end, needed, found, *_ = hits
        num_missing = (num_full if tables.is_offload else num_blocks) - sum(
            len(taken(blocks))
            if groups[number].window is None
            else sum(pool.num_staying(b) == 1 for b in taken(blocks))
            for number, blocks in enumerate(found)
        )
        num_room = num_missing + room - self._room  # what was found and nobody held
        # Host blocks that it shares with a running sequence need no further room, and stream once for all.
        num_shared = sum(
            int((table[number, :, places.start : places.stop] == np.array(blocks, dtype=float)).any(axis=0).sum())
            for number, (places, blocks) in enumerate(zip(needed, found, strict=True))
        )
        hits.let_go(tables)
        num_tokens = sequence.num_tokens - end
        next_key = cache.prefixes.key_behind(sequence, end)
        return hits, _Wanted(num_room, num_full - num_shared, num_blocks - num_shared, num_tokens, next_key)

    @property
    def _room(self) -> int:
        """Number of blocks of the home tier that nobody holds and nobody was promised."""
        return self._cache.num_unpromised_host if self._tables.is_offload else self._cache.copies.gpu_room

    def _verdict(
        self,
        sequence: Sequence,
        wanted: _Wanted,
        running: Several[Sequence],
        held: Several[Sequence],
        passed: Several[Sequence],
    ) -> Verdict:
        first = (*held, *passed)
        num_promised = sum(self._tables.groups.most_full(one.max_num_tokens) for one in first)
        blocks = self._tables.lifetimes.host_blocks
        reserve = self._lacking_reserve(sequence, wanted, running) if running else 0
        if self._tables.is_offload:
            # Whoever runs goes on while memory is pinned for a newcomer, which is asked again in the next step.
            num_room, num_tails = wanted.num_room + num_promised + reserve, len(self._tables.groups) * (len(first) + 1)
            blocks.wait_for(self._cache.num_promised_host + num_room, may_wait=not running)
            self._tell()
            if self._cache.copies.num_obtainable < num_tails or num_room > self._room:
                return Verdict.REFUSED
            if self._keeps_throughput(wanted.num_own, len(running)):
                return Verdict.ADMITTED
            return Verdict.HELD_BACK if first or self._is_held(sequence, wanted) else Verdict.ADMITTED
        num_lacking = wanted.num_room + self._num_room_of(passed, len(running)) + reserve - self._room
        has_room = num_lacking <= 0
        if has_room and not self._leaves_room(sequence, wanted, running, passed, -num_lacking):
            return Verdict.REFUSED
        if has_room and not held:
            return Verdict.ADMITTED
        if not self.may_spill or not has_room and num_lacking <= self._mover.transfers.num_leaving:
            return Verdict.REFUSED  # in the second case there will be room in a moment
        if not running:
            return Verdict.SPILL
        needed = self._mover.num_host_blocks(running) + num_promised + wanted.num_host
        blocks.wait_for(needed, may_wait=False)
        if needed > blocks.num_free:
            return Verdict.REFUSED
        if has_room:
            return Verdict.ADMITTED
        return Verdict.HELD_BACK if first or self._is_held(sequence, wanted) else Verdict.SPILL

    def _leaves_room(
        self, sequence: Sequence, wanted: _Wanted, running: Several[Sequence], passed: Several[Sequence], num_free: int
    ) -> bool:
        """Whether older ones that are passed find room when the sequence has grown: on the GPU, or if not, on the host.

        num_free: GPU blocks that are left when it begins.
        """
        growth = self._tables.groups.most_blocks(sequence.max_num_tokens) - self._tables.num_to_begin(sequence)
        if not passed or not self.may_spill or growth <= num_free:
            return True
        blocks, groups = self._tables.lifetimes.host_blocks, self._tables.groups
        num_wanted = wanted.num_host + sum(groups.most_full(one.max_num_tokens) for one in passed)
        return self._mover.num_host_blocks([*running]) + num_wanted + blocks.num_used <= blocks.num_possible

    def _lacking_reserve(self, sequence: Sequence, wanted: _Wanted, running: Several[Sequence]) -> int:
        """Return what is to be left of the reserve: steps have it, but for what the one that is being planned took."""
        newcomer = Prompt(sequence.num_tokens - wanted.num_tokens, sequence.num_tokens, sequence.max_num_tokens)
        num_growing = len(running) + 1 if sequence.kept_blocks is None else 0  # who comes back leaves some to spare
        cache, is_offload = self._cache, self._tables.is_offload
        num_beyond = cache.num_beyond_host if is_offload else cache.num_beyond_gpu
        return max(0, self.reserve(running, newcomer, num_growing) - num_beyond)

    def _num_kept(self, sequence: Sequence, running: Several[Sequence]) -> int:
        """Return how many GPU blocks rows leave for chunks beside those into which their next tokens go."""
        if not self._tables.is_offload:
            return self._unit_blocks
        newcomer = Prompt(sequence.num_computed, sequence.num_tokens, sequence.max_num_tokens)
        num_blocks = self._tables.gpu_blocks.num_blocks
        return max(self._unit_blocks, self._reserve.on_gpu(self._prompts(running, newcomer), num_blocks))

    def reserve(self, running: Several[Sequence], newcomer: Prompt | None = None, num_growing: int = 0) -> int:
        """Return how many blocks of the home tier are left to the steps of the prompts that run, and of a newcomer.

        Whoever is let in beside others leaves them so many, so no step is shorter for want of blocks. One alone has
        what there is.
        """
        prompts, num_blocks = self._prompts(running, newcomer), self._tables.home[1].num_blocks
        if self._tables.is_offload:
            return self._reserve.on_host(prompts, num_blocks)
        return self._reserve.resident(prompts, num_blocks, num_growing)

    def _prompts(self, running: Several[Sequence], newcomer: Prompt | None = None) -> list[Prompt]:
        """Return what is still to be computed of those that run, in the step that is being planned and behind it."""
        coming, decodes = self._cache.coming, SequenceState.DECODE
        prompts = [
            Prompt(one.num_computed, one.num_tokens, one.max_num_tokens)
            for one in running
            if one.state is not decodes or one in coming
        ]
        return prompts if newcomer is None else [*prompts, newcomer]

    def _num_room_of(self, passed: Several[Sequence], num_running: int) -> int:
        """Return how many GPU blocks those who are passed want in resident mode, even if nothing of them is found.

        Who gave way wants some for the others to grow, and whoever passes it is one of them.
        """
        num_blocks, num_groups = sum(map(self._tables.num_to_begin, passed)), len(self._tables.groups)
        return num_blocks + (num_running + 1) * num_groups * any(one.kept_blocks is not None for one in passed)

    def _is_held(self, sequence: Sequence, wanted: _Wanted) -> bool:
        """Whether the head of the queue is held back once more."""
        if self._held is not sequence:
            self._held, self._num_tries = sequence, -(-wanted.num_tokens // TOKENS_PER_TRY)
        self._num_tries -= 1
        return self._num_tries >= 0

    def _keeps_throughput(self, num_blocks: int, num_running: int) -> bool:
        """Whether one more sequence, with `num_blocks` blocks of its own, does not lower the tokens per second of all.

        A step of n sequences that streams s blocks takes about s / link. With one more sequence and b blocks more for
        which the GPU has no room, (n + 1) / (s + b) >= n / s holds where b <= s / n: the bandwidth need not be known.
        """
        num_streamed = num_blocks - max(0, self._cache.copies.gpu_room)
        if not self.may_spill or num_streamed <= 0:
            return True
        return num_streamed * num_running <= self._cache.copies.num_streamed

    def _take(self, sequence: Sequence, hits: Hits) -> None:
        """Give the sequence, for which there is room, its row and blocks."""
        cache, tables = self._cache, self._tables
        if sequence.kept_blocks is not None:
            cache.take_row(sequence)
            self._mover.bring_back(sequence)
            cache.prefixes.publish_again(sequence)
            return
        table, pool = tables.home
        end, needed, found, below, state, num_known = hits
        for blocks, of_host in zip(found, below, strict=True):
            for block in taken(blocks):
                pool.hold(block)
            for block in taken(of_host):
                tables.lifetimes.host_blocks.hold(block)
        for block in state:
            tables.lifetimes.host_blocks.hold(block)
        row = cache.take_row(sequence)
        for number, (places, blocks) in enumerate(zip(needed, found, strict=True)):
            tables.begins[number, row] = places.start
            held = [NO_BLOCK if block is None else block for block in blocks]
            table[number, row, places.start : places.stop] = held
        cache.begin(sequence, end, num_known)
        self._mover.bring_state(sequence, state)
        if tables.is_offload:
            # Every host block that the sequence can ever fill is promised, so it is never preempted later.
            cache.promise_host(sequence)
            self._take_copies(sequence, found)
            return
        for number, group in enumerate(tables.groups):
            if group.window is None:
                num_blocks = group.most_blocks(sequence.num_tokens)
                new = slice(end // group.block_size, num_blocks)
                tables.gpu[number, row, new] = tables.gpu_blocks.allocate(new.stop - new.start)
        pairs = []
        for number, (places, of_host) in enumerate(zip(needed, below, strict=True)):
            evicted = [place for place, block in zip(places, of_host, strict=True) if block is not None]
            tables.gpu[number, row, evicted] = tables.gpu_blocks.allocate(len(evicted))
            pairs += zip(tables.gpu[number, row, evicted].tolist(), taken(of_host), strict=True)
        cache.promise_windows(sequence)
        self._mover.bring_up(sequence, pairs)

    def _take_copies(self, sequence: Sequence, hits: list[list[int]]) -> None:
        """Take up what is left on the GPU of the blocks that were found, and promise the row GPU blocks."""
        copies, tables, firsts = self._cache.copies, self._tables, []
        for number, (blocks, full) in enumerate(zip(hits, tables.full(sequence), strict=True)):
            found = copies.find(full.start, blocks)
            firsts.append(full.stop - len(found))
            tables.gpu[number, sequence.row, firsts[-1] : full.stop] = found
        copies.set_resident_from(sequence, firsts)
        copies.promise_tails(sequence)
        copies.drop_above_limit()
