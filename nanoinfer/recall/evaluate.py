"""How many questions about a planted fact are answered, by length of the context and depth of the fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from nanoinfer.llm import LLM
from nanoinfer.recall.text import Author, Question, write_document
from nanoinfer.sampling_params import SamplingParams

KIND = "pass_key"
FACTS_PER_PLACE = 5
"""Facts that a document has at each depth: it is read once for all questions about it."""
MIN_LENGTH = 768
"""Tokens of the shortest context: below it the facts of five depths lie side by side."""

Answers = Callable[[list[int], list[list[int]], int], list[list[int]]]
"""(token ids of a document, those of each question behind it, most tokens of an answer) -> token ids of each answer.

An answer ends before the end-of-sequence token. Greedy.
"""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is asked.

    Attributes:
        lengths: tokens of a context, with question and answer, ascending.
        depths: where the facts lie, from 0 (begin) to 1 (end), ascending.
        num_questions: in each cell, rounded up to whole documents.
        seed: of the documents; the same seed asks the same.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_questions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < MIN_LENGTH:
                raise ValueError(f"a context of {length} tokens has no room for the facts: give at least {MIN_LENGTH}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth {depth} is not between 0 (begin) and 1 (end)")
        if not self.lengths or not self.depths or self.num_questions < 1:
            raise ValueError("give at least one length, one depth and one question")

    @property
    def num_documents(self) -> int:
        """Of one length."""
        return -(-self.num_questions // FACTS_PER_PLACE)

    @property
    def questions_per_cell(self) -> int:
        """`num_questions` in whole documents."""
        return self.num_documents * FACTS_PER_PLACE

    @property
    def num_asked(self) -> int:
        """Questions in all."""
        return len(self.lengths) * len(self.depths) * self.questions_per_cell


@dataclass
class Scores:
    """What was answered.

    Attributes:
        right: [length][depth] number of questions with the right answer.
        asked: [length][depth] number of questions.
        answers: the text of each answer, in the order of the questions.
    """

    right: list[list[int]]
    asked: list[list[int]]
    answers: list[str] = field(default_factory=list, repr=False)

    @property
    def accuracy(self) -> list[list[float]]:
        """[length][depth], 0 to 1."""
        return [[r / n for r, n in zip(*row, strict=True)] for row in zip(self.right, self.asked, strict=True)]

    @property
    def lowest(self) -> float:
        """Accuracy of the worst cell."""
        return min(min(row) for row in self.accuracy)


def evaluate(
    answers: Answers, tokenizer: PreTrainedTokenizerBase, grid: Grid, *, progress: bool = True, label: str = ""
) -> Scores:
    """Asks every question of the grid. Right is the whole answer, as text without the spaces around it."""
    empty = [[0] * len(grid.depths) for _ in grid.lengths]
    scores = Scores(empty, [list(row) for row in empty])
    with tqdm(total=grid.num_asked, desc=label or "recall", unit="question", disable=not progress) as bar:
        for row, length in enumerate(grid.lengths):
            bar.set_postfix_str(f"{length} tokens")
            for number in range(grid.num_documents):
                questions = ask(tokenizer, grid, length, number)
                document = _common_prefix([q.prompt_text for q in questions])
                texts = _answers(answers, tokenizer, document, questions)
                for question, text in zip(questions, texts, strict=True):
                    column = min(range(len(grid.depths)), key=lambda i: abs(grid.depths[i] - question.depth))
                    scores.asked[row][column] += 1
                    scores.right[row][column] += text == question.answer_text.strip()
                scores.answers += texts
                bar.update(len(questions))
    return scores


def ask(tokenizer: PreTrainedTokenizerBase, grid: Grid, length: int, number: int) -> list[Question]:
    """The questions about document `number` of a length, in the order of the facts."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    special = len(tokenizer.encode("", add_special_tokens=True))
    sample = Author(Random(0)).fact(KIND).asks[0]  # of as many tokens as all others
    answer = count("".join(sample.answer)) + 1  # the end of the sequence
    document = write_document(
        (grid.seed * 1_000_003 + number) * 10_000_019 + length,
        length - special - answer,
        count,
        [(KIND, depth) for depth in grid.depths for _ in range(FACTS_PER_PLACE)],
    )
    questions = document.questions((KIND,))
    assert len(questions) == len(grid.depths) * FACTS_PER_PLACE
    return questions


def _answers(
    answers: Answers, tokenizer: PreTrainedTokenizerBase, document: str, questions: Sequence[Question]
) -> list[str]:
    document_ids = tokenizer.encode(document)
    prompts = [tokenizer.encode(question.prompt_text) for question in questions]
    assert all(ids[: len(document_ids)] == document_ids for ids in prompts), "a question changed the document's tokens"
    longest = max(len(tokenizer.encode(question.answer_text, add_special_tokens=False)) for question in questions)
    found = answers(document_ids, [ids[len(document_ids) :] for ids in prompts], longest + 1)
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in found]


def _common_prefix(texts: Sequence[str]) -> str:
    """The document that all prompts begin with."""
    return texts[0][: texts[0].rindex("\nQuestion:")]


class EngineAnswers:
    """Answers of an LLM. With prefix caching a document is computed once and asked about often.

    Args:
        after_document: called between the document and its questions; tests put faults in there.
    """

    def __init__(self, llm: LLM, end_token_id: int, after_document: Callable[[LLM], None] | None = None) -> None:
        self._llm, self._end, self._after_document = llm, end_token_id, after_document

    def __call__(self, document: list[int], questions: list[list[int]], max_tokens: int) -> list[list[int]]:
        # Alone, so that its blocks are there to be shared when the questions come.
        self._llm.generate([document], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        if self._after_document is not None:
            self._after_document(self._llm)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[self._end])
        outputs = self._llm.generate([document + question for question in questions], params, use_tqdm=False)
        return [_until(output.outputs[0].token_ids, self._end) for output in outputs]


def _until(token_ids: Sequence[int], end: int) -> list[int]:
    """The ids before the first `end`."""
    token_ids = list(token_ids)
    return token_ids[: token_ids.index(end)] if end in token_ids else token_ids
