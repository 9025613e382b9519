"""Answers, the number of differences between two answers, and the table of these numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from nanoinfer.common.units import counted
from nanoinfer.measure.report import aligned

# Most likely tokens per token. This is OpenAI's limit for /v1/completions, so that servers return as many.
NUM_LOGPROBS = 5


@dataclass(frozen=True)
class Answer:
    """The answer to a request. None: not requested, or not available."""

    tokens: list[int] | list[str] | None  # token ids, or the tokens' texts if a server gives no ids
    text: str | None = None
    logits: list[Tensor] | None = None  # what each token was chosen from, [vocab_size] float32, CPU
    logprobs: list[list[float]] | None = None  # of each token its own, then those of the most likely tokens


def token_logprobs(own: float, others: Iterable[float]) -> list[float]:
    """Return the compared log-probabilities of one token.

    Their number does not depend on whether the token itself is among the most likely ones.
    """
    return [own, *sorted(others, reverse=True)[:NUM_LOGPROBS]]


@dataclass
class Count:
    """The number of compared items, and how many of them differ."""

    compared: int = 0
    different: int = 0

    def add(self, compared: int, different: int) -> None:
        self.compared += compared
        self.different += different

    def __str__(self) -> str:
        return f"{self.different:,} of {self.compared:,}" if self.compared else "-"


@dataclass
class Condition:
    """One line of the table."""

    name: str
    at_once: int = 1  # the most requests that ran at once in the engine, or were open at a server
    requests: Count = field(default_factory=Count)  # a request differs if anything below differs anywhere
    texts: Count = field(default_factory=Count)
    tokens: Count = field(default_factory=Count)
    logits: Count = field(default_factory=Count)
    logprobs: Count = field(default_factory=Count)
    facts: list[str] = field(default_factory=list)  # what happened
    left_out: str | None = None  # why, or why it proves nothing
    failure: str | None = None  # what went wrong; the answers that came are compared all the same

    @property
    def is_wrong(self) -> bool:
        return self.failure is not None or self.requests.different > 0

    def compare(self, wanted: list[Answer], found: list[Answer]) -> None:
        """Count the differences, including those behind a differing token, where the context differs, too."""
        for one, other in zip(wanted, found, strict=True):
            is_different = False
            for count, a, b, differences in (
                (self.texts, one.text, other.text, lambda a, b: (1, a != b)),
                (self.tokens, one.tokens, other.tokens, _of_lists),
                (self.logits, one.logits, other.logits, _of_logits),
                (self.logprobs, one.logprobs, other.logprobs, _of_logprobs),
            ):
                if a is not None and b is not None:
                    compared, different = differences(a, b)
                    count.add(compared, different)
                    is_different |= different > 0
            self.requests.add(1, is_different)


def _of_lists(wanted: list, found: list) -> tuple[int, int]:
    """Return how many items are compared, and how many of them differ."""
    length = max(len(wanted), len(found))
    return length, length - sum(a == b for a, b in zip(wanted, found, strict=False))


def _of_logits(wanted: list[Tensor], found: list[Tensor]) -> tuple[int, int]:
    num_logits = max(len(wanted), len(found)) * len(wanted[0])
    # Compare as integers: bits count, so -0.0 is not 0.0.
    pairs = zip(wanted, found, strict=False)
    return num_logits, num_logits - sum(int((a.view(torch.int32) == b.view(torch.int32)).sum()) for a, b in pairs)


def _of_logprobs(wanted: list[list[float]], found: list[list[float]]) -> tuple[int, int]:
    counts = [_of_lists(one, other) for one, other in zip_longest(wanted, found, fillvalue=[])]
    return sum(compared for compared, _ in counts), sum(different for _, different in counts)


_PARTS = {"texts": "texts", "tokens": "tokens", "logits": "logits", "logprobs": "log-probabilities"}


def table(conditions: list[Condition]) -> str:
    """Return one line per condition. Columns without any value are left out."""
    columns = {"condition": lambda c: c.name, "at once": lambda c: "-" if c.left_out else f"{c.at_once:,}"}
    columns["requests"] = lambda c: str(c.requests)
    for name, title in _PARTS.items():
        if any(getattr(condition, name).compared for condition in conditions):
            columns[title] = lambda condition, name=name: str(getattr(condition, name))
    lines = [[cell(condition) for cell in columns.values()] for condition in conditions]
    text = [aligned([list(columns), *lines])]
    text += [f"{c.name}: {'; '.join(c.facts)}" for c in conditions if c.facts and not c.left_out]
    text += [f"{c.name}: left out: {c.left_out}" for c in conditions if c.left_out]
    text += [f"{c.name}: FAILED: {c.failure}" for c in conditions if c.failure]
    return "\n".join(text)


def is_identical(conditions: list[Condition]) -> bool:
    return not any(condition.is_wrong for condition in conditions)


def verdict(conditions: list[Condition]) -> str:
    """Return the last line of the report."""
    done = [condition for condition in conditions if not condition.left_out]
    left_out = [condition.name for condition in conditions if condition.left_out]
    note = f" (left out: {', '.join(left_out)})" if left_out else ""
    if is_identical(done):
        totals = {title: sum(getattr(c, name).compared for c in done) for name, title in _PARTS.items()}
        shown = [f"{total:,} {title}" for title, total in totals.items() if total]
        return f"identical: {', '.join(shown)} in {counted(len(done), 'condition')}{note}"
    wrong = [f"{c.name} ({'failed' if c.failure else f'{c.requests} requests'})" for c in done if c.is_wrong]
    return f"DIFFERENT in {len(wrong)} of {counted(len(done), 'condition')}: {', '.join(wrong)}{note}"
