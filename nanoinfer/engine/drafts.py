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
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.engine.suffixes import SuffixDrafter
from nanoinfer.kv.cache import KVCache
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.step.batch import Batch
from nanoinfer.step.executor import SampledToken
from nanoinfer.step.memory_plan import MemoryPlan

MAX_PAUSE, MAX_PAUSE_STREAMING = 32, 2
"""Steps after which a sequence looks for a draft again that had none, or a wrong one: to look takes the host, which
otherwise plans a step while the one before runs. Where a step brings KV or weights that time is little."""
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
        are_asked_for: whether the config has settings of them.
        num_drafted, num_accepted, num_passes: tokens that were guessed, and taken; rows' steps that had a draft.
    """

    def __init__(self, config: dict[str, Any] | str, kv_cache: KVCache, max_splits: int, plan: MemoryPlan) -> None:
        self.drafter: Drafter = SuffixDrafter()
        self.are_asked_for = isinstance(config, dict)
        self._most = config["num_speculative_tokens"] if isinstance(config, dict) else DEFAULT_TOKENS
        self._kv_cache, self._max_splits, self._streams = kv_cache, max_splits, plan.passing_bytes > 0
        self._paces: dict[int, _Pace] = {}
        self.num_drafted = self.num_accepted = self.num_passes = 0

    def are_wanted(self, sequences: Collection[Sequence]) -> bool:
        """Whether any of the running sequences looks for a draft next, for which all of its tokens must be known."""
        wanted = False
        if not self._may_pay(len(sequences)):
            return False
        for sequence in sequences:
            if sequence.state is SequenceState.DECODE and self._may_draft(sequence):
                pace = self._pace(sequence)
                pace.pause = max(0, pace.pause - 1)
                wanted |= not pace.pause
        return wanted

    def add(self, batch: Batch[Sequence]) -> Batch[Sequence]:
        """Return a decode step with drafts, as many as there is room for; they are given up before any row waits."""
        if batch.chunks or not self._may_pay(len(batch.decoding)):
            return batch
        kv_cache, drafts, masks = self._kv_cache, {}, {}
        left = min(MAX_LINES - len(batch.decoding), kv_cache.num_free_lines)
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

    def _may_pay(self, num_sequences: int) -> bool:
        """Whether drafts were asked for, or so few run, and something streams."""
        return self.are_asked_for or self._streams_now and num_sequences <= MOST_UNASKED

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether a sequence's masks are made in time, and so is what else its guesses need: under penalties or limits
        each has tables of its own, which the host makes while something streams."""
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


def take_results(
    request: Request,
    sequence: Sequence,
    results: list[SampledToken],
    draft: list[int],
    planner: StepPlanner,
    times: tuple[float, float],
) -> tuple[int, Exception | None]:
    """Have a sequence take what was sampled behind its last token, and behind each drafted token as long as these were
    right and it has not ended. Return how many drafted tokens were right, and why the completion has failed, if it has.

    What goes wrong while the KV of a drafted token is taken is raised: it concerns more than this completion.

    times: when the step was read, and when it was made.
    """
    num_right = 0
    for place, (token_id, logprobs, error) in enumerate(results):
        if place:
            if sequence.finish_reason is not None or sequence.token_ids[-1] != draft[place - 1]:
                break
            planner.accept(sequence)
            num_right += 1
        try:
            if error is not None:
                raise error
            request.take(sequence, token_id, logprobs, *times)
        except Exception as failure:
            return num_right, failure
    return num_right, None
