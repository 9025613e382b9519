"""Where a prompt's beginning stopped being that of a recent one, though much of what follows is the same again.

Such a prompt finds less in the prefix cache than it could: a date or a counter in its header, a template that leaves
out the thinking of earlier turns, documents in another order. Two questions about one document part, too, but nothing
behind that is the same again, and so nothing was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

MAX_RECENT = 64
MAX_RECENT_TOKENS = 2**22  # of all recent sequences together: 16 MiB, and a tenth more for their marks
EXCERPT_TOKENS = 40
_WINDOW = 16  # tokens; what is the same for fewer says little
_NEIGHBOURS = 64  # windows, of any so many neighbours the least is a mark: equal runs of 79 tokens have one in common
_FACTOR, _MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SLICE = 8192  # a list is converted in slices, because other threads cannot run meanwhile


@dataclass(frozen=True)
class Parting:
    """Where a prompt parted from a recent one.

    Attributes:
        at: number of tokens with which both begin.
        num_again: tokens of the prompt behind `at` that the recent one has behind it, too, in runs of at least 16.
        behind: the last tokens that both have.
        here, there: the tokens behind these, of the prompt and of the recent one.
    """

    at: int
    num_again: int
    behind: list[int]
    here: list[int]
    there: list[int]


@dataclass(frozen=True)
class _Recent:
    """A prompt with its output.

    Attributes:
        num_prompt: how many of the tokens are the prompt.
        marks: hashes of some windows of tokens, chosen by what these contain, and so the same ones wherever they stand.
        places: where these windows begin, ascending.
    """

    tokens: np.ndarray
    num_prompt: int
    marks: np.ndarray
    places: np.ndarray


class RecentPrompts:
    """Keeps the tokens of the last prompts with their outputs, and compares each new one with them.

    Used on one thread. The time for one is linear in its tokens and in those that are kept.

    Args:
        block_size: tokens per KV block. A parting that cost less than a block is none.
    """

    def __init__(self, block_size: int, *, max_recent: int = MAX_RECENT, max_tokens: int = MAX_RECENT_TOKENS) -> None:
        self._block_size, self._max_recent, self._max_tokens = block_size, max_recent, max_tokens
        self.recent: deque[_Recent] = deque()

    @property
    def num_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.recent)

    def take(self, token_ids: Several[int], num_prompt: int, num_found: int) -> Parting | None:
        """Remember a request that has ended, and return where its prompt parted from a recent one, if it did.

        Args:
            token_ids: of the prompt and its output.
            num_prompt: how many of them are the prompt.
            num_found: how many of these were found in the prefix cache.
        """
        new = _remembered(token_ids, num_prompt)
        shared = [num_shared(new.tokens, one.tokens) for one in self.recent]
        parting = self._parting(new, num_prompt, num_found, [min(length, num_prompt) for length in shared])
        # One that the new one continues has nothing more to say.
        self.recent = deque(one for one, n in zip(self.recent, shared, strict=True) if n < len(one.tokens))
        self.recent.append(new)
        while len(self.recent) > self._max_recent or self.num_tokens > self._max_tokens:
            self.recent.popleft()
        return parting

    def _parting(self, new: _Recent, num_prompt: int, num_found: int, shared: list[int]) -> Parting | None:
        longest = max(shared, default=0)
        block = longest // self._block_size
        # Of an answer the cache has what was computed ahead.
        known = max((min(n, one.num_prompt) for one, n in zip(self.recent, shared, strict=True)), default=0)
        if not known // self._block_size <= num_found // self._block_size <= block:
            return None  # the cache had more than the recent ones, or not all of it any more
        if any(n == longest == len(one.tokens) for one, n in zip(self.recent, shared, strict=True)):
            return None  # it goes on where a recent one ended
        others = [(one, at) for one, at in zip(self.recent, shared, strict=True) if at // self._block_size == block]
        common = _num_common_marks(new, num_prompt, others)
        best = max(range(len(others)), key=lambda i: (common[i], i), default=None)  # of equal ones the newest
        if best is None or not common[best]:
            return None
        one, at = others[best]
        num_again = _num_again(new.tokens[at:num_prompt], one.tokens[at:])
        if num_again < self._block_size:
            return None
        begin, end = max(0, at - EXCERPT_TOKENS), at + EXCERPT_TOKENS
        parts = new.tokens[begin:at], new.tokens[at : min(end, num_prompt)], one.tokens[at:end]
        return Parting(at, num_again, *(part.tolist() for part in parts))


def num_shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return with how many equal tokens both begin."""
    begin, size, end = 0, 256, min(len(one), len(other))
    while begin < end:
        differs = one[begin : min(end, begin + size)] != other[begin : min(end, begin + size)]
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = begin + size, 4 * size
    return end


def _num_common_marks(new: _Recent, num_prompt: int, others: list[tuple[_Recent, int]]) -> list[int]:
    """Return how many marks of a prompt, behind the first place, are in each of the others."""
    if not others:
        return []
    first, last = new.places.searchsorted((min(at for _, at in others), num_prompt - _WINDOW + 1))
    marks = np.unique(new.marks[first:last])
    if len(marks) == 0:
        return [0] * len(others)
    theirs = [one.marks for one, _ in others]
    owners = np.repeat(np.arange(len(others)), [len(one) for one in theirs])
    sought = np.concatenate(theirs)
    places = np.minimum(marks.searchsorted(sought), len(marks) - 1)
    has = np.zeros((len(others), len(marks)), dtype=bool)
    is_found = marks[places] == sought
    has[owners[is_found], places[is_found]] = True
    return has.sum(axis=1).tolist()


def _num_again(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return how many tokens lie in windows that the others have, too, wherever these stand."""
    begins = np.flatnonzero(np.isin(_hashes(tokens), _hashes(others)))
    edges = np.zeros(len(tokens) + 1, dtype=np.int32)
    edges[begins] += 1
    edges[begins + _WINDOW] -= 1
    return int(np.count_nonzero(np.cumsum(edges)))


def _remembered(token_ids: Several[int], num_prompt: int) -> _Recent:
    tokens = np.empty(len(token_ids), dtype=np.int32)
    for begin in range(0, len(tokens), _SLICE):
        tokens[begin : begin + _SLICE] = token_ids[begin : begin + _SLICE]
    hashes = _hashes(tokens)
    places = _chosen(hashes)
    return _Recent(tokens, num_prompt, hashes[places], places.astype(np.int32))


def _chosen(hashes: np.ndarray) -> np.ndarray:
    """Return the places of those that are the least of some neighbours."""
    if len(hashes) == 0:
        return np.empty(0, dtype=np.int64)
    count = min(_NEIGHBOURS, 1 << len(hashes).bit_length() - 1)  # a power of 2
    padded = np.zeros(len(hashes) + count - 1, dtype=np.uint64)
    padded[count - 1 : len(hashes)] = _of_neighbours(np.minimum, hashes, count)
    return np.flatnonzero(_of_neighbours(np.maximum, padded, count) == hashes)


def _of_neighbours(which: np.ufunc, values: np.ndarray, count: int) -> np.ndarray:
    """Return the minimum or maximum of each `count` neighbours, a power of 2."""
    width = 1
    while width < count:
        values = which(values[:-width], values[width:])
        width *= 2
    return values


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a hash of each window of tokens."""
    hashes = np.zeros(max(0, len(tokens) - _WINDOW + 1), dtype=np.uint64)
    for place in range(_WINDOW):
        hashes *= _FACTOR  # modulo 2**64
        hashes += tokens[place : place + len(hashes)].astype(np.uint64)
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes
