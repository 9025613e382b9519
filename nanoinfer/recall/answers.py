"""Who answers questions about a document, and how far two answers are apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.llm import LLM
from nanoinfer.outputs import CompletionOutput
from nanoinfer.sampling_params import SamplingParams

NUM_LOGPROBS = 5
"""Log-probabilities of so many tokens are compared. That of a right answer alone is near 0 whatever the others do."""


@dataclass
class Answer:
    """Token ids before the end-of-sequence token, and for each of them log-probabilities of the likeliest, by id."""

    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None  # None: not asked for


class Answers(ABC):
    """Answers questions greedily."""

    streamed_bytes = 0
    """KV bytes that were brought from host memory since the start."""

    @abstractmethod
    def __call__(
        self, document: list[int], questions: list[list[int]], max_tokens: int, *, with_logprobs: bool = False
    ) -> list[Answer]:
        """One answer for each question.

        Args:
            document: token ids.
            questions: token ids of each question behind the document.
            max_tokens: of an answer, the end-of-sequence token included.
        """


class EngineAnswers(Answers):
    """Answers of an LLM. With prefix caching a document is computed once and asked about often."""

    def __init__(self, llm: LLM, end_token_id: int) -> None:
        self._llm, self._end = llm, end_token_id

    @property
    def streamed_bytes(self) -> int:
        return self._llm.stats()["streamed_bytes"]

    def __call__(
        self, document: list[int], questions: list[list[int]], max_tokens: int, *, with_logprobs: bool = False
    ) -> list[Answer]:
        # Alone, so that its blocks are there to be shared when the questions come.
        self._llm.generate([document], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            stop_token_ids=[self._end],
            logprobs=NUM_LOGPROBS if with_logprobs else None,
        )
        outputs = self._llm.generate([document + question for question in questions], params, use_tqdm=False)
        return [self._answer(output.outputs[0]) for output in outputs]

    def _answer(self, output: CompletionOutput) -> Answer:
        ids = list(output.token_ids)
        ids = ids[: ids.index(self._end)] if self._end in ids else ids
        if output.logprobs is None:
            return Answer(ids)
        places = output.logprobs[: len(ids)]
        return Answer(ids, [{token: found.logprob for token, found in place.items()} for place in places])


def largest_error(found: Sequence[Answer], wanted: Sequence[Answer]) -> float | None:
    """Return the largest difference of a log-probability that both name, as long as both wrote the same tokens.

    None: there are none.
    """
    errors = []
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.logprobs is None or theirs.logprobs is None:
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=False)
        for our_token, their_token, ours_here, theirs_here in pairs:
            errors += [abs(ours_here[token] - theirs_here[token]) for token in ours_here.keys() & theirs_here.keys()]
            if our_token != their_token:
                break
    return max(errors, default=None)
