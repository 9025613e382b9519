"""Training rows of the "recall" model: documents with questions and answers in between and at the end, as token ids."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from recall_text import KINDS, Mix, TrainingAuthor
from tokenizers import Tokenizer

from nanoinfer.recall.text import HEADING, Ask, Fact, Fragments

# What a target token is: 0 text, 1 + i a part of an answer of KINDS[i] that must be looked up, FORM + 1 + i what stands
# around it in the answer, and its end.
FORM = 8
# Mean tokens of a part of a document and of a question with its answer, to lay a row out.
PART_TOKENS, ASK_TOKENS = 12, 30


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum. length: tokens of a row, without the last target; share: of the training time;
    step_tokens: tokens of a batch; asked: at most this share of a row's tokens is questions and answers.
    """

    length: int
    share: float
    step_tokens: int
    asked: float


@dataclass(frozen=True)
class Batch:
    """ids: [rows, length + 1] uint16; marks: as ids, uint8, see FORM; far: as ids, uint8, for answers the bit length of
    their distance to the fact in tokens. length: of the stage.
    """

    length: int
    ids: np.ndarray
    marks: np.ndarray
    far: np.ndarray


class RowWriter:
    """Writes rows. tokenizer: cuts where fragments end."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self.random = self._rng.random
        self._known: dict[str, list[int]] = {}
        self._bos, self._eos = (tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "eos"))

    def batch(self, stage: Stage) -> Batch:
        rows = max(1, stage.step_tokens // stage.length)
        parts = [self.row(stage.length + 1, stage.asked) for _ in range(rows)]
        ids, marks, far = (np.stack(columns) for columns in zip(*parts))
        return Batch(stage.length, ids, marks, far)

    def row(self, length: int, asked: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One row of `length` tokens: ids uint16, marks and far uint8."""
        random = self._rng.random
        # One row in ten has few facts in much filler, and three in ten have no question before the end.
        asked *= 0.1 if random() < 0.1 else 0.7 + 0.3 * random()
        share_at_end = 1.0 if random() < 0.3 else 0.7 * random()
        num_facts = asked * length / ASK_TOKENS * (1 + 0.6 * random())
        rate = min(0.85, num_facts * PART_TOKENS / ((1 - asked) * length))
        mix = Mix(pass_key=0.66 * rate, table=0.08 * rate, passage=0.06 * rate, count=0.2 * rate)
        # Names recur up to 6 times, so that neither part of a name alone tells the fact.
        num_names = max((2 * num_facts) ** 0.5 + 1, num_facts / (1 + 5 * random()))
        author = TrainingAuthor(self._rng, int(num_names))
        row = _Row(self, length, self._bos)
        row.add_text([HEADING])
        document = length * (1 - asked * share_at_end)
        asked_between = asked * (1 - share_at_end)
        while row.position < document:
            kind = mix.draw(self._rng)
            if kind:
                row.add_fact(author.fact(kind))
            else:
                row.add_text(author.filler())
            if row.asked_tokens < asked_between * row.position and random() < 0.5:
                row.ask(random(), self._eos)
        while row.position < length:
            if not row.ask(random(), self._eos):
                row.add_text(author.filler())
        return row.arrays()

    def encode(self, fragments: Fragments) -> list[int]:
        known, ids = self._known, []
        for fragment in fragments:
            found = known.get(fragment)
            if found is None:
                found = known[fragment] = self._tokenizer.encode(fragment, add_special_tokens=False).ids
            ids += found
        return ids


class _Row:
    """A row that grows, and its facts that were not asked yet."""

    def __init__(self, writer: RowWriter, length: int, bos: int) -> None:
        self._encode, self._random, self._length = writer.encode, writer.random, length
        self._ids = [bos]
        # Bounds of lead, value and tail; kind, position of the fact.
        self._answers: list[tuple[list[int], int, int]] = []
        self._open: dict[tuple, tuple[int, int, Ask]] = {}
        self._open_keys: list[tuple] = []
        self.asked_tokens = 0

    @property
    def position(self) -> int:
        return len(self._ids)

    def add_text(self, text: Fragments) -> None:
        self._ids += self._encode(text)

    def add_fact(self, fact: Fact) -> None:
        kind = KINDS.index(fact.subject[0])
        first = int(self._random() * len(fact.asks))
        for i in {first, int(self._random() * len(fact.asks))}:  # of a table two cells at most
            ask, key = fact.asks[i], (*fact.subject, i)
            if key not in self._open:
                self._open_keys.append(key)
            self._open[key] = (kind, self.position, ask)
        self.add_text(fact.text)

    def ask(self, x: float, eos: int) -> bool:
        """Asks about a fact that was not asked yet. x in [0, 1): chooses it. False: there is none."""
        keys = self._open_keys
        if not keys:
            return False
        place = int(x * len(keys))
        keys[place], keys[-1] = keys[-1], keys[place]
        kind, start, ask = self._open.pop(keys.pop())
        before = self.position
        self.add_text(ask.question)
        bounds = [self.position]
        for part in (ask.lead, ask.value, ask.tail):
            self.add_text(part)
            bounds.append(self.position)
        self._ids.append(eos)
        self._answers.append((bounds, kind, start))
        self.asked_tokens += self.position - before
        return True

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.array(self._ids[: self._length], dtype=np.uint16)
        marks, far = np.zeros(self.position, dtype=np.uint8), np.zeros(self.position, dtype=np.uint8)
        for (begin, first, last, end), kind, start in self._answers:
            marks[begin : end + 1] = kind + 1 + FORM
            marks[first:last] = kind + 1
            far[first:last] = (first - start).bit_length()
        return ids, marks[: self._length], far[: self._length]


class RowPool:
    """Batches from worker processes, ahead of the training. Workers are forked: make it before CUDA is used.

    Which worker's batch comes first depends on timing, so two runs of one seed differ slightly.

    num_workers: 0 writes in this process, the same rows for the same seed.
    """

    def __init__(self, tokenizer: Tokenizer, stages: list[Stage], seed: int, num_workers: int) -> None:
        self._stages = stages
        self._workers: list[multiprocessing.Process] = []
        self._writer = RowWriter(tokenizer, seed)
        if num_workers:
            context = multiprocessing.get_context("fork")
            self._stage = context.Value("i", 0)
            self._queue = context.Queue(maxsize=2 * num_workers)
            for i in range(num_workers):
                arguments = (tokenizer, seed * 1000 + 1 + i, stages, self._stage, self._queue)
                worker = context.Process(target=_work, args=arguments, daemon=True)
                worker.start()
                self._workers.append(worker)

    def batches(self, index: int) -> Iterator[Batch]:
        """Batches of stage `index`, without end. The first few may be left over from the stage before."""
        if not self._workers:
            while True:
                yield self._writer.batch(self._stages[index])
        self._stage.value = index
        while True:
            yield self._queue.get(timeout=120)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        self._workers.clear()


def _work(tokenizer: Tokenizer, seed: int, stages: list[Stage], stage, queue) -> None:
    writer = RowWriter(tokenizer, seed)
    while True:
        queue.put(writer.batch(stages[stage.value]))
