"""Choose the sequences of the next step. The policy is the same in both modes, so both form the same batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nanoinfer.engine.modes import Modes
from nanoinfer.kv.admission import MAX_HELD, Admission, Verdict
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.mover import Mover
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.batch import Batch, PrefillChunk


class Scheduler:
    """First come, first served, with chunked prefill. Who waits for room on the GPU alone may be passed for a while.

    A step is a prefill step or a decode step. When both are wanted and there are few tokens, prefill and decode share
    one step, so that the weights are read only once. With more tokens the two kinds take turns, so a long prompt delays
    the running sequences by one chunk at a time. When the GPU pool is full in resident mode, the engine enters offload
    mode if that is allowed. Otherwise the youngest sequence is preempted: its KV moves to host memory unchanged, and
    the sequence returns to the front of the queue.

    A step is planned while the step before it still runs. A sequence whose tokens are all launched therefore stays in
    `running`, but in no batch, until its last token was read.

    Args:
        max_num_batched_tokens: the most tokens of one prefill step.
        max_mixed_tokens: the most tokens of a mixed step (prompts and running sequences); 0: no mixed steps.
        fail: ends and removes the request of a waiting sequence that no pool that can be used will ever hold, or of a
            running one for whose KV the host has no room.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        admission: Admission,
        mover: Mover,
        max_num_batched_tokens: int,
        max_mixed_tokens: int,
        modes: Modes,
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # admitted, oldest first
        self.num_preemptions = 0
        self._kv_cache, self._admission, self._mover = kv_cache, admission, mover
        self._max_num_batched_tokens = max_num_batched_tokens
        self._modes, self._fail = modes, fail
        self.max_mixed_tokens = max_mixed_tokens
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence and free its row and blocks."""
        if sequence.row is not None:
            self._kv_cache.release(sequence, leave_copies=True)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._mover.forget(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Batch[Sequence] | None:
        """Return the next step, with the blocks that it writes to already allocated; None when nothing can run."""
        wanting = [sequence for sequence in self.running if _wants_token(sequence)]
        if not (wanting and self._last_was_prefill):
            may_mix = 0 < len(wanting) < self.max_mixed_tokens and (
                self.waiting or any(sequence.state is SequenceState.PREFILL for sequence in self.running)
            )
            num_preemptions, num_running = self.num_preemptions, len(self.running)
            # Running sequences get their blocks before new ones are admitted. A sequence that was preempted must not be
            # admitted again in this step, because the host has not read all of its tokens.
            decoding = self._make_room(wanting) if may_mix else []
            chunks = self._schedule_prefill() if self.num_preemptions == num_preemptions else []
            if chunks:
                num_tokens = len(decoding) + sum(chunk.end - chunk.begin for chunk in chunks)
                is_mixed = bool(decoding) and num_tokens <= self.max_mixed_tokens
                self._last_was_prefill = not is_mixed
                return _batch(chunks, decoding if is_mixed else [])
            if (num_preemptions, num_running) != (self.num_preemptions, len(self.running)):  # some were admitted again
                wanting = [sequence for sequence in self.running if _wants_token(sequence)]
        self._last_was_prefill = False
        sequences = self._make_room(wanting)
        return _batch([], sequences) if sequences else None

    def _schedule_prefill(self) -> list[PrefillChunk[Sequence]]:
        chunks: list[PrefillChunk[Sequence]] = []
        budget = self._max_num_batched_tokens
        for sequence in self.running:
            if sequence.state is SequenceState.PREFILL and budget:
                budget -= self._add_chunk(sequence, budget, chunks)
        held: list[Sequence] = []  # the first of those that wait
        while len(held) < min(len(self.waiting), MAX_HELD) and budget:
            sequence = self.waiting[len(held)]
            verdict = self._admission.admit(sequence, self.running, held)
            if verdict is Verdict.SPILL and self._spill():
                verdict = self._admission.admit(sequence, self.running, held)
            is_last_word = verdict is Verdict.SPILL or self._kv_cache.tables.is_offload
            if verdict is not Verdict.ADMITTED and is_last_word and not self._modes.can_hold(sequence):
                self._fail(sequence, self._modes.refusal(sequence))
                continue
            if verdict is Verdict.HELD:
                held.append(sequence)
                continue
            if verdict is not Verdict.ADMITTED:
                break
            self.running.append(sequence)  # append before delete, so that an interrupt cannot lose the sequence
            del self.waiting[len(held)]
            self._mover.forget(sequence)
            sequence.state = _state(sequence)
            if sequence.state is SequenceState.PREFILL:
                budget -= self._add_chunk(sequence, budget, chunks)
        return chunks

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[PrefillChunk[Sequence]]) -> int:
        """Append the sequence's next chunk if there is room for one; return the chunk's number of tokens, or 0."""
        begin = sequence.num_computed
        end = begin + self._kv_cache.max_chunk(sequence, min(budget, sequence.num_tokens - begin))
        edge = end - end % self._kv_cache.tables.block_size
        if begin < edge and end < sequence.num_tokens:
            end = edge  # a chunk that ends on a block edge leaves no half-written block behind
        if end <= begin:
            return 0
        self._kv_cache.grow(sequence, end)
        chunks.append(PrefillChunk(sequence, begin, end, is_last=end == sequence.num_tokens))
        if chunks[-1].is_last:
            sequence.state = SequenceState.DECODE  # from this step on: if it fails, `recover` looks again
        return end - begin

    def _make_room(self, wanting: list[Sequence]) -> list[Sequence]:
        """Give each sequence a slot for its last token; return the sequences that were not preempted meanwhile."""
        for sequence in self._kv_cache.without_slot(wanting):
            wanted = sequence.num_tokens - sequence.num_computed
            while sequence.row is not None and self._kv_cache.max_chunk(sequence, wanted) < wanted:
                if not self._spill():
                    self.preempt_youngest()
            if sequence.row is not None:
                self._kv_cache.grow(sequence, sequence.num_tokens)
        return [sequence for sequence in wanting if sequence.row is not None]

    def _spill(self) -> bool:
        """Enter offload mode, where every full block can leave the GPU; False if impossible or already done."""
        may_spill = self._modes.may_spill and not self._kv_cache.tables.is_offload
        return may_spill and self._modes.enter_offload(self.running)

    def preempt_youngest(self) -> None:
        """Have the sequence that was admitted last give way."""
        victim = self.running[-1]
        try:
            self._mover.give_way(victim)
        except MemoryError as error:  # nothing has changed
            self._fail(victim, error)
            return
        victim.state = SequenceState.WAITING
        self.waiting.appendleft(victim)
        self.running.pop()
        self.num_preemptions += 1

    def recover(self, sequences: list[Sequence]) -> None:
        """After an exception at any point, sort the `sequences` into running, waiting and finished ones.

        A sequence is running if it has a row and no kept blocks. A sequence that was being admitted or preempted waits.
        May be interrupted and called again.
        """
        alive = {sequence for sequence in sequences if sequence.finish_reason is None}
        in_order = [sequence for sequence in dict.fromkeys([*self.running, *self.waiting]) if sequence in alive]
        has_row = {s for s in alive.intersection(self.running) if s.row is not None and s.kept_blocks is None}
        running = [sequence for sequence in in_order if sequence in has_row]
        waiting = deque(sequence for sequence in in_order if sequence not in has_row)
        self.running, self.waiting = running, waiting  # in one line: an interrupt loses no sequence
        for sequence in sequences:
            otherwise = SequenceState.WAITING if sequence in alive else SequenceState.FINISHED
            sequence.state = _state(sequence) if sequence in has_row else otherwise
        self._last_was_prefill = False


def _batch(chunks: list[PrefillChunk[Sequence]], decoding: list[Sequence]) -> Batch[Sequence]:
    sequences, ending = [chunk.sequence for chunk in chunks], [chunk.sequence for chunk in chunks if chunk.is_last]
    return Batch(chunks, decoding, sequences + decoding, ending + decoding)


def _state(sequence: Sequence) -> SequenceState:
    """Return the state of an admitted sequence: whether prefill or decode comes next."""
    is_computed = sequence.num_computed >= sequence.num_tokens - 1 and sequence.num_sampled
    return SequenceState.DECODE if is_computed else SequenceState.PREFILL


def _wants_token(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.DECODE and sequence.num_tokens < sequence.max_num_tokens
