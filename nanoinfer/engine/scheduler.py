"""Who computes what in the next step. The policy is the same in both modes, so both form the same batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nanoinfer.kv.cache import KVCache
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.batch import DecodeBatch, PrefillBatch, PrefillChunk


class Scheduler:
    """First come, first served, with chunked prefill.

    A step is a prefill step or a decode step. While both are wanted they share a step if it has few tokens, because the
    weights are read once for both then. Larger ones take turns, so a long prompt delays the running sequences by one
    chunk at a time. When the GPU pool is full in resident mode, offload mode is entered if that
    is allowed; if not, the youngest sequence gives way: its KV moves to host memory unchanged and it is first in the
    queue again.

    A step is planned while the one before still runs, so a sequence that has all its tokens waits here, out of every
    batch, until the last one was read.

    Args:
        max_num_batched_tokens: tokens of one prefill step.
        max_mixed_tokens: tokens of a step of prompts and running sequences together; 0: there are none.
        enter_offload: switches to offload mode and returns True, or returns False where that cannot be; None: never.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        max_num_batched_tokens: int,
        enter_offload: Callable[[], bool] | None = None,
        max_mixed_tokens: int = 0,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # admitted, oldest first
        self.num_preemptions = 0
        self._kv_cache = kv_cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enter_offload = enter_offload
        self.max_mixed_tokens = max_mixed_tokens
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives back what it holds."""
        if sequence.row is not None:
            self._kv_cache.release(sequence, leave_copies=True)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.saved = None
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> PrefillBatch | DecodeBatch | None:
        """The next step, with the blocks that it writes to in place; None when nothing can run."""
        wanting = [sequence for sequence in self.running if _wants_token(sequence)]
        if not (wanting and self._last_was_prefill):
            may_mix = 0 < len(wanting) < self.max_mixed_tokens and self._wants_prefill
            num_preemptions = self.num_preemptions
            # Those who run get their blocks before others are admitted. Who gave way stays out of this step: the host
            # has not read all of its tokens.
            decoding = self._make_room(wanting) if may_mix else []
            chunks = self._schedule_prefill() if self.num_preemptions == num_preemptions else []
            if chunks:
                num_tokens = len(decoding) + sum(chunk.end - chunk.begin for chunk in chunks)
                is_mixed = bool(decoding) and num_tokens <= self.max_mixed_tokens
                self._last_was_prefill = not is_mixed
                return PrefillBatch(chunks, decoding if is_mixed else [])
            wanting = [sequence for sequence in self.running if _wants_token(sequence)]  # some came back
        self._last_was_prefill = False
        sequences = self._make_room(wanting)
        return DecodeBatch(sequences) if sequences else None

    @property
    def _wants_prefill(self) -> bool:
        return bool(self.waiting) or any(sequence.state is SequenceState.PREFILL for sequence in self.running)

    def _schedule_prefill(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self._max_num_batched_tokens
        for sequence in self.running:
            if sequence.state is SequenceState.PREFILL and budget:
                budget -= self._add_chunk(sequence, budget, chunks)
        while self.waiting and budget:
            sequence = self.waiting[0]
            if not self._kv_cache.admit(sequence):
                # Alone, a prompt that the GPU pool cannot hold would wait for ever.
                if self.running or not self._spill() or not self._kv_cache.admit(sequence):
                    break
            self.running.append(sequence)  # before it leaves the queue: an interrupt must not lose it
            self.waiting.popleft()
            sequence.saved = None
            sequence.state = _state(sequence)
            if sequence.state is SequenceState.PREFILL:
                budget -= self._add_chunk(sequence, budget, chunks)
        return chunks

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[PrefillChunk]) -> int:
        """Appends the sequence's next chunk, if it has room for one, and returns its tokens."""
        begin = sequence.num_computed
        end = begin + self._kv_cache.max_chunk(sequence, min(budget, sequence.num_tokens - begin))
        edge = end // self._kv_cache.block_size * self._kv_cache.block_size
        if begin < edge and end < sequence.num_tokens:
            end = edge  # a chunk that ends on a block edge leaves no half-written block behind
        if end <= begin:
            return 0
        self._kv_cache.grow(sequence, end)
        chunks.append(PrefillChunk(sequence, begin, end))
        return end - begin

    def _make_room(self, wanting: list[Sequence]) -> list[Sequence]:
        """Gives each of these a slot for its last token; returns those that have not had to give way."""
        for sequence in self._kv_cache.without_slot(wanting):
            while sequence.row is not None and not self._has_room(sequence):
                if not self._spill():
                    self._preempt_youngest()
            if sequence.row is not None:
                self._kv_cache.grow(sequence, sequence.num_tokens)
        return [sequence for sequence in wanting if sequence.row is not None]

    def _has_room(self, sequence: Sequence) -> bool:
        missing = self._kv_cache.num_missing(sequence, sequence.num_tokens)
        wanted = sequence.num_tokens - sequence.num_computed
        return missing == 0 or self._kv_cache.max_chunk(sequence, wanted) >= wanted

    def _spill(self) -> bool:
        """Enters offload mode, where every full block can leave the GPU; False if that cannot be, or was done."""
        return self._enter_offload is not None and self._kv_cache.offload is None and self._enter_offload()

    def _preempt_youngest(self) -> None:
        victim = self.running[-1]
        self._kv_cache.save(victim)  # may lack host memory: nothing has changed then
        victim.state = SequenceState.WAITING
        self.waiting.appendleft(victim)
        self.running.pop()
        self.num_preemptions += 1

    def recover(self, sequences: list[Sequence]) -> None:
        """Sorts the sequences that go on into those that run and those that wait, after an exception in the middle of
        anything. May be interrupted and called again.

        A sequence runs if it has a row and its KV is nowhere else; one that was being admitted or preempted waits.
        """
        alive = set(sequences)
        in_order = [sequence for sequence in dict.fromkeys([*self.running, *self.waiting]) if sequence in alive]
        has_row = {s for s in self.running if s.row is not None and s.saved is None}
        self.running = [sequence for sequence in in_order if sequence in has_row]
        self.waiting = deque(sequence for sequence in in_order if sequence not in has_row)
        for sequence in self.waiting:
            sequence.state, sequence.row = SequenceState.WAITING, None
            if sequence.saved is None:
                sequence.num_computed = sequence.num_cached = 0
        for sequence in self.running:
            sequence.state = _state(sequence)
        self._last_was_prefill = False


def _state(sequence: Sequence) -> SequenceState:
    """What an admitted sequence does next."""
    is_computed = sequence.num_computed >= sequence.num_tokens - 1 and sequence.num_sampled
    return SequenceState.DECODE if is_computed else SequenceState.PREFILL


def _wants_token(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.DECODE and sequence.num_sampled < sequence.max_tokens
