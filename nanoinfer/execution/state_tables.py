"""What the host tells a step of the states of its sequences: see `StateRuns`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanoinfer.kernels.layer.state_runs import CHUNK
from nanoinfer.step.plan import PromptChunk

NONE = -1


@dataclass(frozen=True)
class StateTables:
    """Makes the arrays of `StateRuns` for prefill steps.

    Attributes:
        padding_slot: the slot that padding names.
        max_runs: the most runs of a step.
    """

    padding_slot: int
    max_runs: int

    def of_step(self, chunks: Sequence[PromptChunk], decoding: np.ndarray, count: int, is_fixed: bool) -> list:
        """Return the arrays for a step's tokens and padding up to `count`: those of prompts, then decoding rows.

        decoding: the state slots of rows that decode. is_fixed: whether sizes, too, may depend on `count` alone, as a
        captured graph needs it.
        """
        lengths = np.array([*(chunk.end - chunk.begin for chunk in chunks), *np.ones(len(decoding), dtype=int)], int)
        slots = np.array([*(chunk.state_slot for chunk in chunks), *decoding], int)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        columns = np.repeat(np.stack([slots, begins, ends]), lengths, axis=1)
        for chunk, begin in zip(chunks, begins, strict=False):
            for end, slot in chunk.passed:
                columns[0, begin + end - chunk.begin - 1] = slot
        num_live = columns.shape[1]
        padding = np.full((3, count - num_live), self.padding_slot)
        pairs = zip(begins[: len(chunks)], ends[: len(chunks)], strict=True)
        firsts = np.concatenate([np.zeros(0, int), *(np.arange(begin, end, CHUNK) for begin, end in pairs)])
        rows = np.arange(num_live - len(decoding), num_live)
        if is_fixed:
            most = min(count, self.max_runs)
            firsts, rows = _filled(firsts, most_chunks(count, most)), _filled(rows, most)
        return [*np.concatenate([columns, padding], axis=1), firsts, rows]

    def most_elements(self, count: int) -> int:
        """Return how many elements the arrays of `count` tokens have at most, each begun at a multiple of 4."""
        most = min(count, self.max_runs)
        return sum(-(-size // 4) * 4 for size in (count, count, count, most_chunks(count, most), most))


def most_chunks(num_tokens: int, num_runs: int) -> int:
    """Return how many chunks so many runs have at most."""
    return (num_tokens + (CHUNK - 1) * num_runs) // CHUNK


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.full(size - len(values), NONE)])
