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
    places = completion.logprobs or []
    numbers = [{token: found.logprob for token, found in place.items()} for place in places]
    return Answer(list(completion.token_ids), numbers)


def until_tokens_differ(wanted: Sequence[int], found: Sequence[int]) -> Iterator[int]:
    """Yield the places of two answers behind equal tokens: what stands there can be compared."""
    for place, (one, other) in enumerate(zip(wanted, found, strict=False)):
        yield place
        if one != other:
            return


def first_difference(wanted: Answer, found: Answer) -> int | None:
    """Return the first place where a token or a log-probability differs in any bit; None if there is none."""
    for place in until_tokens_differ(wanted.token_ids, found.token_ids):
        if (
            wanted.token_ids[place] != found.token_ids[place]
            or wanted.logprobs[place:][:1] != found.logprobs[place:][:1]
        ):
            return place
    lengths = len(wanted.token_ids), len(found.token_ids)
    return None if lengths[0] == lengths[1] else min(lengths)


def largest_error(wanted: Sequence[Answer], found: Sequence[Answer]) -> float | None:
    """Return the largest difference of a log-probability that both name behind equal tokens; None: there are none."""
    errors = []
    for theirs, ours in zip(wanted, found, strict=True):
        for place in until_tokens_differ(theirs.token_ids, ours.token_ids) if theirs.logprobs and ours.logprobs else ():
            one, other = theirs.logprobs[place], ours.logprobs[place]
            errors += [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    return max(errors, default=None)
