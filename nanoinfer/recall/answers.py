"""Who answers questions about a document: the engine, or what it is compared with."""

from __future__ import annotations

from typing import Protocol

from nanoinfer.llm import LLM
from nanoinfer.measure.answers import Answer, answer_of
from nanoinfer.sampling_params import SamplingParams

NUM_LOGPROBS = 5
"""Log-probabilities of so many tokens are compared. That of a right answer alone is near 0 whatever the others do."""


class Answers(Protocol):
    """Answers questions greedily."""

    streamed_bytes: int
    """KV bytes that were brought from host memory since the start."""

    def __call__(
        self, document: list[int], questions: list[list[int]], max_tokens: int, *, with_logprobs: bool = False
    ) -> list[Answer]:
        """Return one answer for each question, without the end-of-sequence token.

        Args:
            document: token ids.
            questions: token ids of each question behind the document.
            max_tokens: of an answer, the end-of-sequence token included.
            with_logprobs: whether log-probabilities of the likeliest tokens are wanted at each place.
        """


class EngineAnswers:
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
        return [until_end(answer_of(output.outputs[0]), self._end) for output in outputs]


def until_end(answer: Answer, end_token_id: int) -> Answer:
    """Return what stands before the end-of-sequence token."""
    ids = answer.token_ids
    count = ids.index(end_token_id) if end_token_id in ids else len(ids)
    return Answer(ids[:count], answer.logprobs[:count])
