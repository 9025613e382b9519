"""Answers of different runs to the same requests, compared token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nanoinfer.outputs import CompletionOutput


class Answer(NamedTuple):
    """Token ids, and for each of them log-probabilities by token id; none where they were not asked for."""

    token_ids: list[int]
    logprobs: Sequence[dict[int, float]] = ()


def answer_of(completion: CompletionOutput) -> Answer:
    """Return what was generated; the log-probabilities that were asked for as plain numbers."""
    positions = completion.logprobs or []
    numbers = [{token: one.logprob for token, one in position.items()} for position in positions]
    return Answer(list(completion.token_ids), numbers)


def until_tokens_differ(wanted: Sequence[int], actual: Sequence[int]) -> Iterator[int]:
    """Yield the positions of two answers behind equal tokens: what stands there can be compared."""
    for position, (one, other) in enumerate(zip(wanted, actual, strict=False)):
        yield position
        if one != other:
            return


def first_difference(wanted: Answer, actual: Answer) -> int | None:
    """Return the first position where a token or a log-probability differs in any bit; None if there is none."""
    for position in until_tokens_differ(wanted.token_ids, actual.token_ids):
        if (
            wanted.token_ids[position] != actual.token_ids[position]
            or wanted.logprobs[position:][:1] != actual.logprobs[position:][:1]
        ):
            return position
    lengths = len(wanted.token_ids), len(actual.token_ids)
    return None if lengths[0] == lengths[1] else min(lengths)


def largest_error(wanted: Sequence[Answer], actual: Sequence[Answer]) -> float | None:
    """Return the largest difference of a log-probability that both name behind equal tokens; None: there are none."""
    errors = []
    for theirs, ours in zip(wanted, actual, strict=True):
        if not theirs.logprobs or not ours.logprobs:
            continue
        for position in until_tokens_differ(theirs.token_ids, ours.token_ids):
            one, other = theirs.logprobs[position], ours.logprobs[position]
            errors += [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    return max(errors, default=None)
