"""Drafts: tokens that are guessed and computed beside the one that is known, and taken where they were right.

A drafted token is a line of the step's batch, in a row of the device that no sequence has: with the block table of its
sequence, its length and its place in the noise. So its logits are those that the sequence would have without drafts,
to the bit, if all tokens before it are right; and the host takes what was sampled behind it if it is what was sampled
before it. What was guessed wrong leaves no trace: its KV is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanoinfer.common.speculation import DEFAULT_TOKENS, MAX_LINES
from nanoinfer.engine.meter import LaunchedStep
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.engine.suffixes import SuffixDrafter
from nanoinfer.kv.cache import KVCache
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.batch import Batch
from nanoinfer.step.executor import SampledToken
from nanoinfer.step.memory_plan import MemoryPlan

MAX_PAUSE, MAX_PAUSE_STREAMING = 32, 2
"""Steps after which a sequence drafts again after a wrong draft, or looks again for one where none was found. Where a
step brings KV or weights there is time to look in each."""
MOST_LOST = 0.01
"""Share of the time of steps without drafts that drafts may cost in the long run."""
KEPT = 4
"""Steps without drafts whose time drafts may cost at once, once they have brought as much."""
MOST_UNKNOWN = 16
"""Steps that may wait while no plain one is known to compare with, as behind a prompt; then drafts rest for one."""
MOST_UNASKED = 4
"""Sequences that run at once up to which there are drafts that nobody asked for: more share what a step brings."""


class Drafter(Protocol):
    """Guesses tokens."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> list[int]:
        """Return up to `most` tokens that may come next. The tokens begin with those of the sequence's last call."""

    def keep(self, sequence_ids: set[int]) -> None:
        """Forget all but these sequences."""

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""


class Balance:
    """What drafts have brought, in seconds, less what they have cost. Below 0 they rest.

    A step that waited for the tokens of the one before, since drafts wanted to know them, is compared with plain steps
    of as many rows. Plain ones give `MOST_LOST` of their time to drafts, and gains are kept up to the time of `KEPT`
    steps: so drafts that never pay make all steps together longer by that share at most, whatever a wrong one costs,
    and those that pay are hardly ever held back.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_unknown = 0  # steps that waited, since the last plain one, and that none is known for
        self._plain: dict[int, float] = {}  # the time of a plain step, by its rows: a running mean

    @property
    def allows(self) -> bool:
        """Whether drafts may be tried."""
        return self._seconds >= 0 and self._num_unknown < MOST_UNKNOWN

    def forget_steps(self) -> None:
        """Forget how long steps take: they take another time from now on."""
        self._plain.clear()

    def note_plain(self, seconds: float, num_rows: int) -> None:
        """Note a step that did not wait for the host."""
        self._num_unknown = 0
        mean = self._plain.get(num_rows, seconds)
        self._plain[num_rows] = mean = mean + (min(seconds, 2 * mean) - mean) / 8
        self._seconds = min(self._seconds + MOST_LOST * mean, KEPT * mean)

    def note_tried(self, seconds: float, num_rows: int, num_drafted: int, num_right: int) -> None:
        """Note a step that waited, from the end of the one before to its own."""
        plain = self._plain.get(num_rows)
        if plain is None:
            self._num_unknown += 1
        else:
            # A draft costs no more than steps for all of its tokens would: what is beyond that is another's delay. And
            # never nothing: else nobody would find out by a plain step that one takes less time than was thought.
            lost = min(max(seconds - plain, MOST_LOST * plain), plain * (1 + num_drafted))
            self._seconds = min(self._seconds + plain * num_right / num_rows - lost, KEPT * plain)


@dataclass
class _Pace:
    """How much a sequence drafts.

    Attributes:
        length: the most tokens of its next draft.
        num_wrong: drafts in a row that brought nothing.
        pause: steps until it looks for a draft again.
    """

    length: int
    num_wrong: int = 0
    pause: int = 0


class Drafts:
    """Chooses which tokens are drafted in a step, and counts what was taken.

    Args:
        config: `EngineConfig.speculative_config`, checked: settings, or "auto".
        max_splits: splits that one decode step may attend to.
        plan: says whether weights pass to the GPU in each step.

    Attributes:
        drafter: guesses.
        balance: says whether drafts have paid.
        are_asked_for: whether the config has settings of them.
        needs_stream: whether those that were not asked for come only while something streams; a chat has them always.
        num_drafted, num_accepted, num_passes: tokens that were guessed, and taken; rows' steps that had a draft.
    """

    def __init__(self, config: dict[str, Any] | str, kv_cache: KVCache, max_splits: int, plan: MemoryPlan) -> None:
        self.drafter: Drafter = SuffixDrafter()
        self.balance = Balance()
        self.are_asked_for, self.needs_stream = isinstance(config, dict), True
        self._most = config["num_speculative_tokens"] if isinstance(config, dict) else DEFAULT_TOKENS
        self._kv_cache, self._max_splits, self._streams = kv_cache, max_splits, plan.passing_bytes > 0
        self._paces: dict[int, _Pace] = {}
        self.num_drafted = self.num_accepted = self.num_passes = 0
        self._last_read: float | None = None  # when the newest decode step was read
        self._was_offload = False  # whether KV could lie on the host then
        self._num_counted = 0, 0  # tokens drafted and accepted until then

    def are_wanted(self, sequences: Collection[Sequence]) -> bool:
        """Whether any of the running sequences drafts next, for which all of its tokens must be known.

        It looks behind those that are known by now: who finds nothing there costs nobody a wait.
        """
        wanted = False
        if not self._may_pay(len(sequences)):
            return False
        num_decoding = sum(one.state is SequenceState.DECODE for one in sequences)
        may_try = self.balance.allows and self._num_free(num_decoding) > 0
        for sequence in sequences:
            if sequence.state is SequenceState.DECODE and self._may_draft(sequence):
                pace = self._pace(sequence)
                pace.pause = max(0, pace.pause - 1)
                if pace.pause or not may_try:
                    continue
                if self.drafter.propose(sequence.sequence_id, sequence.token_ids, 1):
                    wanted = True
                elif not self._streams_now:
                    self._note(sequence, 0, 0)  # looking takes the host's time, too
        return wanted

    def add(self, batch: Batch[Sequence]) -> Batch[Sequence]:
        """Return a decode step with drafts, as many as there is room for; they are given up before any row waits."""
        if batch.chunks or not (self.balance.allows and self._may_pay(len(batch.decoding))):
            return batch
        kv_cache, drafts, masks = self._kv_cache, {}, {}
        left = self._num_free(len(batch.decoding))
        splits = self._max_splits - kv_cache.num_reserved_splits
        for sequence in batch.decoding:
            if sequence.num_pending or not self._may_draft(sequence) or (pace := self._pace(sequence)).pause:
                continue
            of_line = kv_cache.tables.num_splits(sequence.max_num_tokens)
            most = min(pace.length, left, splits // of_line, sequence.max_num_tokens - sequence.num_tokens - 1)
            found = self.drafter.propose(sequence.sequence_id, sequence.token_ids, most) if most > 0 else []
            if found and sequence.matcher is not None:
                masks[sequence] = sequence.matcher.ahead(*sequence.output, found)
                found = found[: len(masks[sequence])]
            while found and sequence.thinking is not None and sequence.thinking.may_end(*sequence.output, len(found)):
                found = found[:-1]  # behind it a token may be forced that only the host knows
            room = kv_cache.max_chunk(sequence, sequence.num_tokens + len(found) - sequence.num_computed)
            found = found[: max(0, sequence.num_computed + room - sequence.num_tokens)]
            if not found:
                masks.pop(sequence, None)
                self._note(sequence, 0, 0)
                continue
            kv_cache.grow(sequence, sequence.num_tokens + len(found))
            kv_cache.take_draft_slots(sequence, len(found))
            drafts[sequence] = found
            left, splits = left - len(found), splits - of_line * len(found)
        return replace(batch, drafts=drafts, draft_masks=masks) if drafts else batch

    def _num_free(self, num_decoding: int) -> int:
        """How many tokens may be drafted beside so many rows; 0 or less: none."""
        return min(MAX_LINES - num_decoding, self._kv_cache.num_free_lines)

    def _may_pay(self, num_sequences: int) -> bool:
        """Whether drafts were asked for, or so few run, and something streams if it has to."""
        if self.are_asked_for:
            return True
        return num_sequences <= MOST_UNASKED and (self._streams_now or not self.needs_stream)

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether a sequence has more than one token left, its masks are made in time, and so is what else its guesses
        need: under penalties or limits each has tables of its own, which the host makes while something streams."""
        if sequence.num_tokens + 1 >= sequence.max_num_tokens:
            return False
        params = sequence.params
        plain = params.repetition_penalty == 1 and not (params.presence_penalty or params.frequency_penalty)
        return not sequence.is_masked_aside and (plain and sequence.limits is None or self._streams_now)

    @property
    def _streams_now(self) -> bool:
        return self._streams or self._kv_cache.copies.residency.num_streamed > 0

    def count(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Note what became of a sequence's draft."""
        if not num_drafted:
            return
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_passes += 1
        self._note(sequence, num_drafted, num_accepted)

    def note_read(self, step: LaunchedStep, now: float) -> None:
        """Note when a step was read, behind `count` of all its drafts."""
        is_offload = self._kv_cache.tables.is_offload
        is_unlike, self._was_offload = step.batch.chunks or is_offload is not self._was_offload, is_offload
        last, self._last_read = self._last_read, None if is_unlike else now
        before, self._num_counted = self._num_counted, (self.num_drafted, self.num_accepted)
        num_rows = len(step.batch.decoding)
        if is_unlike:  # those behind it take another time than those before
            self.balance.forget_steps()
        elif last is not None and step.is_apart:
            self.balance.note_tried(now - last, num_rows, self.num_drafted - before[0], self.num_accepted - before[1])
        elif last is not None and step.launched < last:
            self.balance.note_plain(now - last, num_rows)

    def _note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        pace = self._pace(sequence)
        if num_accepted:
            pace.num_wrong = pace.pause = 0
            grown = 2 * num_accepted if num_accepted == num_drafted else num_accepted + 1
            pace.length = min(self._most, max(2, grown))
            return
        pace.num_wrong += 1
        pace.length = max(1, pace.length // 2) if num_drafted else pace.length
        pace.pause = min(2 ** min(pace.num_wrong, 16), MAX_PAUSE_STREAMING if self._streams_now else MAX_PAUSE)

    def _pace(self, sequence: Sequence) -> _Pace:
        return self._paces.setdefault(sequence.sequence_id, _Pace(self._most))

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Forget all sequences but these, which have not ended."""
        kept = {sequence.sequence_id for sequence in sequences}
        self.drafter.keep(kept)
        self._paces = {number: pace for number, pace in self._paces.items() if number in kept}


def take_drafted(
    request: Request,
    sequence: Sequence,
    results: list[SampledToken],
    draft: list[int],
    planner: StepPlanner,
    times: tuple[float, float],
) -> tuple[int, Exception | None]:
    """Have a sequence take what was sampled behind each drafted token, as long as these were right and it has not
    ended. Return how many drafted tokens were right, and why the completion has failed, if it has.

    What goes wrong while the KV of a drafted token is taken is raised: it concerns more than this completion.

    times: when the step was read, and when it was made.
    """
    num_right = 0
    for guess, result in zip(draft, results, strict=True):
        if sequence.finish_reason is not None or sequence.token_ids[-1] != guess:
            break
        planner.accept(sequence)
        num_right += 1
        try:
            request.take(sequence, result, times)
        except Exception as failure:
            return num_right, failure
    return num_right, None
