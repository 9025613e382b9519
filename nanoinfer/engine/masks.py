"""Which tokens the grammars and the thinking of a step's sequences allow, made while the step's layers run."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from nanoinfer.requests.sequence import Sequence
from nanoinfer.structured.matcher import mask_of

# More are slower: 64 masks took 8.6 ms with 8 threads and 13.8 with 32 on 16 processors (tools/gpu_structured.py).
_MAX_THREADS = 8


class MaskMaker:
    """Makes the masks of a step. Knows no device.

    Args:
        vocab_size: of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._words = np.zeros((0, 0), dtype=np.int32)  # what llguidance writes, reused
        self._executor: Any = None

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

    def _of_grammars(self, sequences: list[Sequence]) -> tuple[np.ndarray | None, list[tuple[Sequence, Exception]]]:
        """Return what `make` does, of the sequences that have a grammar."""
        places, states, failed = [], [], []
        for place, sequence in enumerate(sequences):
            if sequence.matcher is not None and sequence.finish_reason is None:
                try:
                    state = sequence.matcher.read(*sequence.output)
                except ValueError as error:
                    failed.append((sequence, error))
                else:
                    places.append(place)
                    states.append(state)
        if not places:
            return None, failed
        words = self._filled(states, sequences[places[0]].matcher.grammar.num_words)
        lines = np.zeros((len(places), 1 + self._num_words), dtype=np.int32)
        lines[:, 0], lines[:, 1:] = places, words[:, : self._num_words]
        for line, place in zip(lines, places, strict=True):
            try:
                sequences[place].matcher.narrow(line[1:])
            except ValueError as error:
                failed.append((sequences[place], error))
        return lines, failed

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

            self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
        jobs = [(state, place) for place, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(jobs, words.ctypes.data, 4 * num_words, len(states))
        return words
