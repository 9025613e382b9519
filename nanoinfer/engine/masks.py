"""Which tokens the grammars of a step's sequences allow, made while the step's layers run."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from nanoinfer.requests.sequence import Sequence

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
        """Return the masks of the sequences that have a grammar and have not ended, whose tokens were all read.

        Returns:
            [masks, 1 + ceil(vocab_size / 32)] int32: a sequence's place among `sequences`, then a bit for each token
            that may come, the lowest of the first word first; None: no sequence has a grammar. And the sequences that
            cannot go on, with the reason.
        """
        places, states, failed = [], [], []
        for place, sequence in enumerate(sequences):
            if sequence.matcher is not None and sequence.finish_reason is None:
                try:
                    state = sequence.matcher.read(sequence.token_ids, len(sequence.prompt_token_ids))
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
