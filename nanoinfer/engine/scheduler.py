"""Choose the sequences of the next step. The policy is the same in both modes, so both form the same batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from itertools import chain, islice
from operator import attrgetter, itemgetter

from nanoinfer.engine.modes import Modes
from nanoinfer.kv.admission import MAX_HELD, Admission, Verdict
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.mover import Mover
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.batch import Batch, PrefillChunk

_number = attrgetter("sequence_id")  # in the order in which they came


class Scheduler:
    """First come, first served, with chunked prefill. Who waits for room on the GPU alone may be passed for a while.

    The oldest prompt has a prefill step for itself but for what shorter ones take: prompts with at most half as much
    left, whether they run or wait, have up to half of the step, the least left first. So a short prompt waits for few
    steps, however many long ones came before it, and the oldest always moves on. Nobody is let in before an older
    prompt for which there would not be room then.

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
        step_unit: chunks of prompts end on multiples of so many tokens, but the last; 0: anywhere.
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
        step_unit: int = 0,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # admitted, oldest first
        self.num_preemptions = 0
        self._kv_cache, self._admission, self._mover = kv_cache, admission, mover
        self._max_num_batched_tokens, self._step_unit = max_num_batched_tokens, step_unit
        self._modes, self._fail = modes, fail
        self.max_mixed_tokens = max_mixed_tokens
        self._last_was_prefill = False
        self._pausing: set[Sequence] = set()  # those that lacked a block in the newest step
        self._may_send_down = False  # whether the GPU may evict something soon that the host does not have

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence and free its row and blocks."""
        if sequence.row is not None:
            self._mover.release(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._mover.forget(sequence)
        self._may_send_down = True
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Batch[Sequence] | None:
        """Return the next step, with the blocks that it writes to already allocated; None when nothing can run."""
        transfers = self._mover.transfers
        self._kv_cache.coming.clear()
        if transfers.groups:
            transfers.end_step()
        for sequence in self.running:
            if sequence.state is SequenceState.MOVING and self._mover.has_arrived(sequence):
                sequence.state = _state(sequence)
        batch = self._next_batch()
        if self._may_send_down:
            self._may_send_down = self._mover.send_down(
                self._admission.reserve(self.running, num_growing=len(self.running))
            )
        if transfers.groups:
            transfers.advance()
        return batch

    def _next_batch(self) -> Batch[Sequence] | None:
        wanting = [sequence for sequence in self.running if _wants_token(sequence)]
        if not (wanting and self._last_was_prefill):
            may_mix = 0 < len(wanting) < self.max_mixed_tokens and (
                self.waiting or any(sequence.state is SequenceState.PREFILL for sequence in self.running)
            )
            num_preemptions, running = self.num_preemptions, list(self.running)
            # Running sequences get their blocks before new ones are admitted. A sequence that was preempted must not be
            # admitted again in this step, because the host has not read all of its tokens.
            decoding = self._make_room(wanting) if may_mix else []
            chunks = self._schedule_prefill() if self.num_preemptions == num_preemptions else []
            if chunks:
                num_tokens = len(decoding) + sum(chunk.end - chunk.begin for chunk in chunks)
                is_mixed = bool(decoding) and num_tokens <= self.max_mixed_tokens
                self._last_was_prefill = not is_mixed
                return _batch(chunks, decoding if is_mixed else [])
            if num_preemptions != self.num_preemptions or running != self.running:  # some have gone or come
                wanting = [sequence for sequence in self.running if _wants_token(sequence)]
        self._last_was_prefill = False
        sequences = self._make_room(wanting)
        return _batch([], sequences) if sequences else None

    def _schedule_prefill(self) -> list[PrefillChunk[Sequence]]:
        """Return the chunks of a prefill step, the oldest prompt's first, and let prompts in for that."""
        chunks: list[PrefillChunk[Sequence]] = []
        held: list[Sequence] = []  # the first of those that wait
        budget = self._max_num_batched_tokens
        begun = deque(sorted(filter(_is_prompt, self.running), key=_number))
        for_shorter, behind = budget // 2, self._least_left_first(begun)
        seen: set[Sequence] = set()  # those of `behind` that have had their turn in this step
        lets_in = self._pausing.isdisjoint(self.running)  # what becomes free is for those that pause
        behind = behind if lets_in else [(left, one) for left, one in behind if one.row is not None]
        while budget:
            may_ask = lets_in and len(held) < min(len(self.waiting), MAX_HELD)
            if begun and not (may_ask and _number(self.waiting[len(held)]) < _number(begun[0])):
                sequence = begun.popleft()
                if sequence in seen or not _is_prompt(sequence):  # it may have ended with its request meanwhile
                    continue
            elif may_ask:
                sequence, lets_in = self._ask_first(held)
                if sequence is None or sequence.state is not SequenceState.PREFILL:
                    continue
            else:
                break
            seen.add(sequence)
            most = min(for_shorter, budget)
            shorter = self._shorter(sequence, behind, seen, held, most)
            own = budget - min(most, sum(map(_num_left, shorter)))
            budget -= self._add_chunk(sequence, max(own, min(self._step_unit, budget)), chunks)
            for one in shorter:
                num_tokens = self._add_chunk(one, min(for_shorter, budget), chunks)
                budget, for_shorter = budget - num_tokens, for_shorter - num_tokens
        return chunks

    def _ask_first(self, held: list[Sequence]) -> tuple[Sequence | None, bool]:
        """Let the first prompt in that waits and is not held. Return it if it is in, and whether to ask the next."""
        sequence = self.waiting[len(held)]
        if self._kv_cache.prefixes.is_coming(sequence, filter(_computes_prompt, self.running)):
            return None, False  # what is left of this step would have it compute all of that anew
        verdict = self._let_in(sequence, held)
        if verdict is Verdict.ADMITTED:
            return sequence, True
        is_last_word = verdict is Verdict.SPILL or self._kv_cache.tables.is_offload
        if is_last_word and not self._modes.can_hold(sequence):
            self._fail(sequence, self._modes.refusal(sequence))
            return None, True
        if verdict is Verdict.HELD_BACK:
            held.append(sequence)
        return None, verdict is Verdict.HELD_BACK

    def let_others_come_first(self) -> bool:
        """Have the first that waits, as nothing can run, wait behind those that gave way and that resident mode holds,
        if there are any: they have the host blocks that it lacks to go on in offload mode."""
        sequence, *others = self.waiting
        most = self._modes.max_sequence_tokens("resident")
        places = [at for at, one in enumerate(others) if one.kept_blocks is not None and one.num_tokens <= most]
        if sequence.num_tokens <= most or not places:
            return False
        others.insert(places[-1] + 1, sequence)
        self.waiting = deque(others)  # in one line: an interrupt loses no sequence
        return True

    def _least_left_first(self, begun: Iterable[Sequence]) -> list[tuple[int, Sequence]]:
        """Return the prompts that may have a part of a step before older ones, with how many tokens each has left.

        There are none where all that is left fits into the step.
        """
        if sum(map(_num_left, chain(begun, self.waiting))) <= self._max_num_batched_tokens:
            return []
        waiting = islice(self.waiting, self._kv_cache.num_free_rows)
        found = [(_num_left(one), one) for one in begun] + [(self._admission.num_left(one), one) for one in waiting]
        return sorted(found, key=itemgetter(0))

    def _shorter(
        self, oldest: Sequence, behind: list[tuple[int, Sequence]], seen: set[Sequence], held: list[Sequence], most: int
    ) -> list[Sequence]:
        """Return the prompts that share the step of `oldest` before older ones, for `most` tokens in all; let them in.

        These have at most half as much left as it has, so the time to a first token is shorter on the average: such a
        prompt takes up to twice its own time, where it would wait for all of the other's, which it delays by its own.
        """
        shorter: list[Sequence] = []
        for num_left, one in behind:
            if most <= 0 or 2 * num_left > _num_left(oldest):
                break
            if one in seen or one.state is SequenceState.FINISHED:
                continue
            if self._kv_cache.prefixes.is_coming(one, self.running):  # a later step finds it
                continue
            seen.add(one)
            if one.row is None:
                place = self.waiting.index(one)
                verdict = self._let_in(one, held, list(islice(self.waiting, len(held), place)))
                if verdict is Verdict.HELD_BACK and place == len(held) < MAX_HELD:
                    held.append(one)
                elif verdict is not Verdict.ADMITTED and verdict is not Verdict.HELD_BACK:
                    break
            if one.state is SequenceState.PREFILL:
                shorter.append(one)
                most -= num_left
        return shorter

    def _let_in(self, sequence: Sequence, held: list[Sequence], passed: Several[Sequence] = ()) -> Verdict:
        """Admit the waiting sequence behind those that are `held` and `passed`, if there is room."""
        verdict = self._admission.admit(sequence, self.running, held, passed)
        if verdict is Verdict.SPILL and self._spill(may_wait=not self.running):
            verdict = self._admission.admit(sequence, self.running, held, passed)
        if verdict is Verdict.ADMITTED:
            self._may_send_down = True
            self.running.append(sequence)  # append before delete, so that an interrupt cannot lose the sequence
            del self.waiting[len(held) + len(passed)]
            self._mover.forget(sequence)
            sequence.state = _state(sequence) if self._mover.has_arrived(sequence) else SequenceState.MOVING
        return verdict

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[PrefillChunk[Sequence]]) -> int:
        """Append the sequence's next chunk if there is room for one; return the chunk's number of tokens, or 0."""
        begin, ends = sequence.num_computed, sequence.snapshot_ends
        num_slots = self._kv_cache.num_spare_slots(len(self.waiting)) if ends else 0
        until = ends[num_slots] if num_slots < len(ends) else sequence.num_tokens
        end = begin + self._kv_cache.max_chunk(sequence, min(budget, until - begin))
        unit = self._step_unit or 1
        if end < sequence.num_tokens:
            end -= end % unit
            edge = end - end % self._kv_cache.tables.block_size
            if begin < edge and edge % unit == 0:
                end = edge  # a chunk that ends on a block edge leaves no half-written block behind
        if end <= begin:
            return 0
        self._kv_cache.grow(sequence, end)
        passed = [one for one in ends if one < end]
        slots = self._kv_cache.slots.allocate(len(passed))
        is_last = end == sequence.num_tokens
        chunks.append(PrefillChunk(sequence, begin, end, is_last, tuple(zip(passed, slots, strict=True))))
        if is_last:
            sequence.state = SequenceState.DECODE  # from this step on: if it fails, `recover` looks again
        return end - begin

    def keep_snapshots(self, batch: Batch[Sequence]) -> None:
        """Have the states copied to the host that others may begin with, behind a step that was launched."""
        for chunk in batch.chunks:
            if chunk.sequence.snapshot_ends and self._mover.keep_snapshots(chunk.sequence, chunk.passed):
                chunk.sequence.state = SequenceState.MOVING

    def _make_room(self, wanting: list[Sequence]) -> list[Sequence]:
        """Give each sequence a slot for its last token; return those that go on.

        Whoever finds none pauses, and others go on, while what another one had is on its way to the host, and while
        memory is being pinned into which the engine can spill or another one give way. When all pause for memory, the
        youngest gives way to what there is; one alone waits.
        """
        transfers, self._pausing = self._mover.transfers, set()
        num_leaving = transfers.num_leaving if transfers.groups else 0
        without_slot = self._kv_cache.without_slot(wanting)
        for sequence in without_slot:
            while sequence.row is not None and not self._has_slot(sequence):
                is_last = len(self._pausing) + 1 >= len(wanting)
                spills = self._spill(may_wait=len(self.running) == 1)
                if spills:
                    continue
                is_coming = num_leaving > 0 or self.running[-1].state is SequenceState.MOVING
                if not is_coming and (is_last or spills is False and self._mover.may_give_way(self.running[-1])):
                    self.preempt_youngest()
                    self._mover.transfers.advance()
                    self._mover.transfers.let_go()  # where copies run at once
                    num_leaving = self._mover.transfers.num_leaving - len(self._pausing)
                    continue
                num_leaving -= 1
                self._pausing.add(sequence)
                break
            if sequence.row is not None and sequence not in self._pausing:
                self._kv_cache.grow(sequence, sequence.num_tokens)
        if without_slot and len(self.running) > 1:
            self._prepare_to_give_way()
        return [sequence for sequence in wanting if sequence.row is not None and sequence not in self._pausing]

    def _prepare_to_give_way(self) -> None:
        """Have memory pinned for the youngest once not every row finds another block, before all pause."""
        tables, youngest = self._kv_cache.tables, self.running[-1]
        num_growing = len(self.running) * (len(tables.groups) - len(tables.windowed))
        is_short = self._kv_cache.copies.gpu_room < num_growing
        if is_short and not (tables.is_offload or self._modes.may_spill or youngest.state is SequenceState.MOVING):
            self._mover.may_give_way(youngest)

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether there are blocks for the last token of a sequence."""
        wanted = sequence.num_tokens - sequence.num_computed
        return self._kv_cache.max_chunk(sequence, wanted) == wanted

    def wait(self) -> bool:
        """Wait until some blocks have left or arrived, as nothing can run before; False: none are on their way."""
        are_coming = not self._mover.transfers.is_idle
        self._mover.transfers.wait()
        return are_coming or any(sequence.state is SequenceState.MOVING for sequence in self.running)

    def _spill(self, may_wait: bool) -> bool | None:
        """Enter offload mode, where every full block can leave the GPU; False if impossible or already done, None: not
        yet.

        may_wait: whether those that run may stand still until there is host memory for that.
        """
        may_spill = self._modes.may_spill and not self._kv_cache.tables.is_offload
        return may_spill and self._modes.enter_offload(self.running, may_wait)

    def preempt_youngest(self) -> None:
        """Have the sequence that was admitted last give way."""
        victim = self.running[-1]
        assert victim.state is not SequenceState.MOVING, "its KV is on its way to the GPU"
        try:
            self._mover.give_way(victim)
        except MemoryError as error:  # nothing has changed
            self._fail(victim, error)
            return
        victim.state = SequenceState.WAITING
        self._may_send_down = True
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


def _num_left(sequence: Sequence) -> int:
    """Return how many tokens of a prompt have no KV yet."""
    return sequence.num_tokens - sequence.num_computed


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.PREFILL


def _computes_prompt(sequence: Sequence) -> bool:
    """Whether a sequence computes its prompt, be it that it waits for a copy first, or that the step which is being
    planned ends the prompt and passes a state that others may go on from."""
    is_left = sequence.num_computed < len(sequence.prompt_token_ids)
    return _is_prompt(sequence) or is_left and (sequence.state is SequenceState.MOVING or bool(sequence.snapshot_ends))


def _wants_token(sequence: Sequence) -> bool:
    is_open = sequence.state is SequenceState.DECODE and sequence.num_tokens < sequence.max_num_tokens
    return is_open and not (sequence.is_masked_aside and _awaits_mask(sequence))


def _awaits_mask(sequence: Sequence) -> bool:
    """Whether the next mask of a sequence is still to be made aside."""
    return bool(sequence.num_pending) or sequence.mask is not None and not sequence.mask.done()
