"""A drafter that guesses what comes next from where the last tokens stood before, in the prompt or the answer.

The index of a sequence has, for stretches of two lengths, the newest place behind each: a table of places by the hash
of the stretch. A place that another stretch has taken is found out by comparing tokens, so a guess may be lost, and
never comes from another stretch. The idea is that of prompt lookup decoding (https://arxiv.org/abs/2304.04487) and of
suffix decoding (https://arxiv.org/abs/2411.04975).
"""

from __future__ import annotations

import numpy as np

LONG, SHORT = 16, 4
"""Tokens of a stretch. Long ones are looked for first: after short ones, what comes differs more often."""
MOST_COMPARED = 64
"""Tokens back from the end that a place is compared in: the more are equal, the more is guessed."""
SLICE = 32_768
"""Tokens that are put into the index at a time, in less than a millisecond."""
_FACTOR = 0x9E3779B97F4A7C15


class SuffixIndex:
    """Where the stretches of one sequence's tokens stood last. It takes at most 32 bytes a token."""

    def __init__(self) -> None:
        self._tokens = np.zeros(0, dtype=np.int32)
        self._tables: dict[int, np.ndarray] = {}
        self._num_tokens = 0
        self._num_indexed = 0  # of stretches that end before this place

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + sum(table.nbytes for table in self._tables.values())

    def guess(self, token_ids: list[int], most: int) -> list[int]:
        """Return up to `most` tokens that may come behind `token_ids`, which begin with those of the call before."""
        self._take(token_ids)
        if self._num_indexed < self._num_tokens - 1:
            return []  # the index is still being made
        for length in (LONG, SHORT):
            place = self._found(length)
            if place is None:
                continue
            num_equal = self._num_equal(place)
            most = min(most, num_equal) if num_equal < LONG else most
            rest = self._tokens[place : min(place + most, self._num_tokens)]
            return np.resize(rest, most).tolist()  # what comes behind the end is what came behind the place, again
        return []

    def _take(self, token_ids: list[int]) -> None:
        """Put new tokens into the index, but for the stretch at the end, which is looked for."""
        begin, end = self._num_tokens, len(token_ids)
        if end > len(self._tokens):
            self._grow(end + end // 4 + 64)
        self._tokens[begin:end] = token_ids[begin:end]
        self._num_tokens = end
        first = self._num_indexed
        self._num_indexed = last = min(end - 1, first + SLICE) if end else 0
        for length, table in self._tables.items():
            ends = np.arange(max(first, length), last + 1 if last < end - 1 else last)
            if len(ends):
                table[self._hashes(ends, length) % np.uint64(len(table))] = ends

    def _grow(self, capacity: int) -> None:
        tokens = np.zeros(capacity, dtype=np.int32)
        tokens[: self._num_tokens] = self._tokens[: self._num_tokens]
        self._tokens, self._num_indexed = tokens, 0
        self._tables = {length: np.zeros(2 * capacity, dtype=np.int32) for length in (LONG, SHORT)}

    def _hashes(self, ends: np.ndarray, length: int) -> np.ndarray:
        """Return the hash of the stretch before each of neighbouring places, uint64."""
        tokens = self._tokens[ends[0] - length : ends[-1]].astype(np.uint64) + np.uint64(1)
        width, factor = 1, np.uint64(_FACTOR)
        with np.errstate(over="ignore"):
            while width < length:  # of twice as many tokens
                tokens = tokens[width:] + tokens[:-width] * factor
                width, factor = 2 * width, factor * factor
            return (tokens ^ (tokens >> np.uint64(29))) * np.uint64(_FACTOR) >> np.uint64(16)

    def _found(self, length: int) -> int | None:
        """Return the newest place, before the end, behind the stretch of this length at the end."""
        end = self._num_tokens
        if end <= length:
            return None
        (at,) = self._hashes(np.array([end]), length) % np.uint64(len(self._tables[length]))
        place = int(self._tables[length][at])
        is_same = place >= length and np.array_equal(
            self._tokens[place - length : place], self._tokens[end - length : end]
        )
        return place if is_same else None

    def _num_equal(self, place: int) -> int:
        """Return how many tokens before a place are those before the end, up to `MOST_COMPARED`."""
        most, end = min(place, MOST_COMPARED), self._num_tokens
        differ = np.flatnonzero(self._tokens[place - most : place] != self._tokens[end - most : end])
        return most - 1 - int(differ[-1]) if len(differ) else most


class SuffixDrafter:
    """Guesses from each sequence's own tokens. This is `Drafter` of `nanoinfer.engine.drafts`."""

    def __init__(self) -> None:
        self._indices: dict[int, SuffixIndex] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory of all indices."""
        return sum(index.num_bytes for index in self._indices.values())

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> list[int]:
        return self._indices.setdefault(sequence_id, SuffixIndex()).guess(token_ids, most)

    def keep(self, sequence_ids: set[int]) -> None:
        for sequence_id in self._indices.keys() - sequence_ids:
            del self._indices[sequence_id]
