"""Which tokens the grammars and the thinking of a step's sequences allow, made while the step's layers run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.batch import Batch
from nanoinfer.structured.matcher import mask_of

# More are slower: 64 masks took 8.6 ms with 8 threads and 13.8 with 32 on 16 processors (tools/gpu_structured.py).
_MAX_THREADS = 8
# A mask usually takes a tenth of a millisecond. Of an ambiguous grammar, or at a new place of a large one, it may take
# longer than a step.
LATE_SECONDS = 0.01


class MaskMaker:
    """Makes the masks of a step. Knows no device.

    All rows wait for them. So a sequence whose mask took long has the next one made aside, once its last token was
    read, and is in no step before that is done; until one is quick again.

    Args:
        vocab_size: of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._words = np.zeros((0, 0), dtype=np.int32)  # what llguidance writes, reused
        self._executor: Any = None
        self._aside: ThreadPoolExecutor | None = None

    def are_wanted(self, sequences: Iterable[Sequence]) -> bool:
        """Whether a mask is to be made for one of these before it samples."""
        # With many rows a call for each would count.
        return any((one.matcher is not None or one.thinking is not None) and one.needs_mask for one in sequences)

    def make(self, sequences: list[Sequence]) -> tuple[np.ndarray | None, list[tuple[Sequence, Exception]]]:
        """Return the masks of the sequences that need one and have not ended, whose tokens were all read.

        Returns:
            [masks, 1 + ceil(vocab_size / 32)] int32: a sequence's place among `sequences`, then a bit for each token
            that may come, the lowest of the first word first; None: no sequence needs one. And the sequences that
            cannot go on, with the reason.
        """
        lines, failed = self._of_grammars(sequences)
        ends = []
        for place, sequence in enumerate(sequences):
            if sequence.thinking is None or sequence.finish_reason is not None:
                continue
            if (wanted := sequence.thinking.next_token(*sequence.output)) is None:
                continue
            only = mask_of([wanted], self._num_words)
            if sequence.matcher is None:
                ends.append(np.concatenate(([place], only), dtype=np.int32))
            elif lines is not None:
                (found,) = np.nonzero(lines[:, 0] == place)
                if (lines[found, 1:] & only).any():  # where the grammar takes no end, nothing is thought
                    lines[found, 1:] = only
        if ends:
            lines = np.stack(ends) if lines is None else np.concatenate((lines, ends))
        return lines, failed

    def with_drafts(self, batch: Batch[Sequence], masks: np.ndarray | None) -> np.ndarray | None:
        """Return what `make` has returned of a batch with drafted tokens, and their masks: places are those among all
        rows."""
        known = {} if masks is None else {batch.sampled[line[0]]: line[1:] for line in masks}
        found = []
        for place, (sequence, number, _) in enumerate(batch.lines()):
            of_drafts = batch.draft_masks.get(sequence, ())
            words = (known.get(sequence), *of_drafts)[number] if number <= len(of_drafts) else None
            if words is not None:
                found.append(np.concatenate(([place], words[: self._num_words]), dtype=np.int32))
        return np.stack(found) if found else None

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Begin the masks that are made aside, of sequences whose tokens were all read."""
        for sequence in sequences:
            if sequence.is_masked_aside and sequence.mask is None and sequence.finish_reason is None:
                if self._aside is None:
                    self._aside = ThreadPoolExecutor(_num_threads(), "nanoinfer-masks")
                sequence.mask = self._aside.submit(self._made, sequence)

    def wait(self, sequences: Iterable[Sequence]) -> bool:
        """Wait for a mask that is made aside; False: none is."""
        coming = [sequence.mask for sequence in sequences if sequence.mask is not None]
        return bool(coming and wait(coming, return_when=FIRST_COMPLETED))

    def close(self) -> None:
        if self._aside is not None:
            self._aside.shutdown(wait=False, cancel_futures=True)

    def _of_grammars(self, sequences: list[Sequence]) -> tuple[np.ndarray | None, list[tuple[Sequence, Exception]]]:
        """Return what `make` does, of the sequences that have a grammar."""
        found, aside, failed = {}, {}, []
        for place, sequence in enumerate(sequences):
            if sequence.matcher is not None and sequence.finish_reason is None:
                mask, sequence.mask = sequence.mask, None
                try:
                    if mask is not None:
                        aside[place] = self._taken(sequence, mask)
                    else:
                        found[place] = sequence.matcher.read(*sequence.output)
                except ValueError as error:
                    failed.append((sequence, error))
        if not (found or aside):
            return None, failed
        lines = np.zeros((len(found) + len(aside), 1 + self._num_words), dtype=np.int32)
        lines[:, 0] = [*found, *aside]
        if found:
            began = time.perf_counter()
            num_words = sequences[next(iter(found))].matcher.grammar.num_words
            lines[: len(found), 1:] = self._filled(list(found.values()), num_words)[:, : self._num_words]
            if time.perf_counter() - began > LATE_SECONDS * -(-len(found) // _num_threads()):
                for place in found:  # it is one of these
                    sequences[place].is_masked_aside = True
        for line, place in zip(lines, found, strict=False):
            try:
                sequences[place].matcher.narrow(line[1:])
            except ValueError as error:
                failed.append((sequences[place], error))
        for line, words in zip(lines[len(found) :], aside.values(), strict=True):
            line[1:] = words
        return lines, failed

    def _made(self, sequence: Sequence) -> tuple[np.ndarray, float]:
        """Return the mask of one sequence, and how long it took."""
        began, words = time.perf_counter(), np.zeros(sequence.matcher.grammar.num_words, dtype=np.int32)
        sequence.matcher.read(*sequence.output).unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        sequence.matcher.narrow(words[: self._num_words])
        return words[: self._num_words], time.perf_counter() - began

    def _taken(self, sequence: Sequence, mask: Future[tuple[np.ndarray, float]]) -> np.ndarray:
        words, seconds = mask.result()
        sequence.is_masked_aside = seconds > LATE_SECONDS
        return words

    def _filled(self, states: list[Any], num_words: int) -> np.ndarray:
        """Return the masks of llguidance's matchers: [matchers, num_words] int32, valid until the next call."""
        if len(self._words) < len(states):
            self._words = np.zeros((len(states), num_words), dtype=np.int32)
        words = self._words[: len(states)]
        if len(states) == 1:
            states[0].unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return words
        if self._executor is None:
            from llguidance import LLExecutor  # whoever has a matcher has imported it

            self._executor = LLExecutor(num_threads=_num_threads())
        jobs = [(state, place) for place, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(jobs, words.ctypes.data, 4 * num_words, len(states))
        return words


def _num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)
