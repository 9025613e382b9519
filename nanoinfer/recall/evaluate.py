"""How many questions about a planted fact are answered, by length of the context and depth of the fact."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from nanoinfer.measure.answers import Answer
from nanoinfer.recall.answers import Answers
from nanoinfer.recall.text import Author, write_document

FACTS_PER_PLACE = 5
"""Facts that a document has at each depth: it is read once for all questions about it."""
MIN_LENGTH = 768
"""Tokens of the shortest context: below it the facts of five depths lie side by side."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is asked."""

    lengths: tuple[int, ...]  # tokens of a context, with question and answer, ascending
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # where the facts lie, from begin to end, ascending
    num_questions: int = 20  # in each cell; a multiple of `FACTS_PER_PLACE`, which makes whole documents
    seed: int = 0  # of the documents; the same seed asks the same

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < MIN_LENGTH:
                raise ValueError(f"--context {length} has no room for the facts: give at least {MIN_LENGTH} tokens")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths: {depth} is not between 0 (begin) and 1 (end)")
        if not self.lengths or not self.depths or self.num_questions < 1:
            raise ValueError("give at least one length, one depth and one question")
        if self.num_questions % FACTS_PER_PLACE:
            raise ValueError(
                f"--questions {self.num_questions} must be a multiple of {FACTS_PER_PLACE}, the questions about one "
                "place of a document"
            )

    @property
    def num_asked(self) -> int:
        return len(self.lengths) * len(self.depths) * self.num_questions


@dataclass(frozen=True)
class Paper:
    """A document with its questions."""

    document: list[int]  # token ids
    questions: list[list[int]]  # token ids of each question behind the document, in the order of the facts
    answers: list[str]  # the right ones
    max_tokens: int  # of an answer, with its end


class Exam:
    """All documents and questions of a grid, tokenised once: every mode is asked the same.

    Raises:
        ValueError: the facts do not fit, or the tokenizer cannot be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grid: Grid) -> None:
        self.tokenizer, self.grid = tokenizer, grid
        documents = range(grid.num_questions // FACTS_PER_PLACE)  # of each length
        self.papers = [[self._paper(length, number) for number in documents] for length in grid.lengths]

    def _paper(self, length: int, number: int) -> Paper:
        depths = [depth for depth in self.grid.depths for _ in range(FACTS_PER_PLACE)]
        author = Author(Random((self.grid.seed * 1_000_003 + number) * 10_000_019 + length))
        special = len(self.tokenizer.encode("")) + 1  # the end of the sequence
        try:
            text = write_document(author, length - special, lambda text: len(self._encode(text)), depths)
        except ValueError as error:
            raise ValueError(
                f"--context {length} has no room for the facts of {len(self.grid.depths)} --depths ({error}): name "
                "fewer --depths or a longer --context"
            ) from error
        asks = [ask for at in text.planted if at.wished for ask in at.fact.asks]
        questions, answers = (
            ["".join(part) for part in parts] for parts in zip(*((a.question, a.answer) for a in asks))
        )
        document, asked = self.tokenizer.encode(text.text), [self._encode(question) for question in questions]
        # All questions alike: one of each length tells. A document of 64k tokens takes 0.3 s.
        if number == 0 and document + asked[0] != self.tokenizer.encode(text.text + questions[0]):
            raise ValueError(
                "the model's tokenizer gives a document other tokens when a question follows: recall can be asked of "
                'tokenizers that begin a token at "\\nQuestion" only'
            )
        longest = max(len(self._encode(answer)) for answer in answers)
        return Paper(document, asked, [answer.strip() for answer in answers], longest + 1)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass
class Scores:
    """What was answered."""

    right: list[list[int]]  # [length][depth] number of questions with the right answer
    asked: int  # questions in each cell
    answers: list[str] = field(default_factory=list, repr=False)  # the text of each, in the order of the questions
    probes: list[list[Answer]] = field(default_factory=list, repr=False)  # [length] about the first document
    streamed_bytes: list[int] = field(default_factory=list)  # [length] bytes that were brought from host memory

    @property
    def accuracy(self) -> list[list[float]]:
        """[length][depth], 0 to 1."""
        return [[right / self.asked for right in row] for row in self.right]

    @property
    def lowest(self) -> float:
        """Accuracy of the worst cell."""
        return min(min(row) for row in self.accuracy)


def evaluate(answers: Answers, exam: Exam, *, progress: bool = True, label: str = "") -> Scores:
    """Ask every question. Right is the whole answer, as text without the spaces around it.

    Only about the first document of each length log-probabilities are asked for: the other documents shall be answered
    as users' prompts are.
    """
    grid = exam.grid
    scores = Scores([[0] * len(grid.depths) for _ in grid.lengths], grid.num_questions)
    with tqdm(total=grid.num_asked, desc=label or "recall", unit="question", disable=not progress) as bar:
        for row, (length, papers) in enumerate(zip(grid.lengths, exam.papers, strict=True)):
            bar.set_postfix_str(f"{length} tokens")
            before = answers.streamed_bytes
            for number, paper in enumerate(papers):
                given_answers = answers(paper.document, paper.questions, paper.max_tokens, with_logprobs=number == 0)
                if number == 0:
                    scores.probes.append(given_answers)
                texts = exam.tokenizer.batch_decode([a.token_ids for a in given_answers], skip_special_tokens=True)
                for i, (text, wanted) in enumerate(zip(texts, paper.answers, strict=True)):
                    scores.right[row][i // FACTS_PER_PLACE] += text.strip() == wanted
                    scores.answers.append(text.strip())
                bar.update(len(texts))
            scores.streamed_bytes.append(answers.streamed_bytes - before)
    return scores
