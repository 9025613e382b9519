"""Documents of filler sentences and pass keys, and questions about these, each with exactly one right answer.

Answers come in the words of the fact: models learn to look up what stands in the same words long before anything else.
Other kinds of fact, which the model is trained on, too, are written by `tools/recall_text.py`.

Text is written as fragments, which join to it. A fragment ends where the recall tokenizer ends a token in any case, so
fragments can be tokenised one by one and counted apart. The same seed gives the same text in every version of Python:
only `Random.random` is called.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

_FILE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {name: text.split() for name, text in _FILE.items() if name != "sentences"}
"""Lists of words by name."""
HEADING = "Records."
ANSWER = "\nAnswer:"
SENTENCE_TOKENS = 16
"""No filler sentence is longer, in tokens of the recall tokenizer."""
PASS_KEY_SHARE = 0.08
"""Share of pass keys that nobody asks about among the parts of a document; all others are filler sentences."""

Fragments = list[str]


class Ask(NamedTuple):
    """A question about a fact: from "\\nQuestion:" to "\\nAnswer:". The answer is a lead, which starts with a space or
    is empty, the value, which must be looked up, and a tail."""

    question: Fragments
    lead: Fragments
    value: Fragments
    tail: Fragments

    @property
    def answer(self) -> Fragments:
        return self.lead + self.value + self.tail


class Fact(NamedTuple):
    """A fact as it stands in the text. subject: its kind, and what it is about."""

    subject: tuple[str, ...]
    text: Fragments
    asks: list[Ask]


class Author:
    """Writes the parts of one document. No two facts have the same subject."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.names: list[tuple[Sequence[str], Sequence[str]]] = [(WORDS["first_names"], WORDS["last_names"])]
        self._used: set[tuple[str, ...]] = set()

    def filler(self) -> Fragments:
        """Return a sentence without a fact."""
        template = self.pick(_SENTENCES)
        text = [part if type(part) is str else self.pick(part) for part in template]
        text[0] = self.start() + text[0]
        return text

    def distractor(self, room: int) -> Fact | None:
        """Return a fact that need not be asked about, or None where filler comes. room: tokens before a wished fact."""
        return self.pass_key() if self.rng.random() < PASS_KEY_SHARE else None

    def pass_key(self) -> Fact:
        """Return the pass key of somebody who has none yet.

        Raises:
            ValueError: all have one.
        """
        name, key = self.unused("pass_key", *self.names), self.digits(5)
        lead = [" The pass key of", *name, " is", " "]
        question = ["\nQuestion: What is the pass key of", *name, "?" + ANSWER]
        text = [self.start() + "The pass key of", *lead[1:], *key, "."]
        return Fact(("pass_key", *name), text, [Ask(question, lead, key, ["."])])

    def unused(self, kind: str, *pools: tuple[Sequence[str], Sequence[str]]) -> Fragments:
        """Return a pair from the first of the pools in which one is easily found."""
        for first, last in pools:
            for _ in range(50):
                pair = [" " + self.pick(first), " " + self.pick(last)]
                if (kind, *pair) not in self._used:
                    self._used.add((kind, *pair))
                    return pair
        raise ValueError(f"the document has too many facts of the kind {kind}: lower its share or the length")

    def start(self) -> str:
        """Return what parts a sentence from the one before."""
        return "\n" if self.rng.random() < 0.15 else " "

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.random() * len(choices))]

    def digits(self, number: int) -> Fragments:
        """Return so many digits; the first one is not 0."""
        low = 10 ** (number - 1)
        return [*str(low + int(self.rng.random() * 9 * low))]


class Planted(NamedTuple):
    """A fact in a document. start: its first token, counted from the document's; wished: it can be asked about."""

    fact: Fact
    start: int
    wished: bool


class Document:
    """A text that grows. num_tokens: its tokens so far, without special ones; planted: the facts in their order."""

    def __init__(self, author: Author, count: Callable[[Fragments], int]) -> None:
        self._author, self._count, self._text = author, count, [HEADING]
        self.num_tokens, self.planted = count(self._text), list[Planted]()

    @property
    def text(self) -> str:
        return "".join(self._text)

    def add(self, fact: Fact, *, wished: bool) -> None:
        self.planted.append(Planted(fact, self.num_tokens, wished))
        self._add(fact.text)

    def fill(self, target: int, *, strictly: bool) -> None:
        """Add filler and distractors until `target` tokens are half a sentence away at most.

        strictly: stay below the target, and stop where no sentence is short enough.
        """
        failures = 0
        while (left := target - self.num_tokens) > 0 and failures < 8:
            fact = self._author.distractor(left) if left > 2 * SENTENCE_TOKENS else None
            if fact:
                self.add(fact, wished=False)
            elif self._count(text := self._author.filler()) <= (left if strictly else 2 * left):
                self._add(text)
            else:
                failures += 1

    def _add(self, text: Fragments) -> None:
        self._text += text
        self.num_tokens += self._count(text)


def write_document(
    author: Author, num_tokens: int, count_tokens: Callable[[str], int], depths: Sequence[float] = ()
) -> Document:
    """Return a document that, with any question about its wished facts and the answer, has `num_tokens` tokens or a
    sentence less.

    Args:
        num_tokens: without special tokens, such as the one that the tokenizer puts in front.
        count_tokens: tokens of a fragment, without special tokens.
        depths: relative depth (0 to 1) of each pass key wished for, ascending. The first token of a fact lies half a
            sentence from that depth at most, or as far as the other wished facts need to fit: those of the same depth
            follow each other, and those of depth 1 end the document.

    Raises:
        ValueError: the wished facts do not fit.
    """
    count_tokens = cache(count_tokens)

    def count(fragments: Fragments) -> int:
        return sum(map(count_tokens, fragments))

    document, facts = Document(author, count), [author.pass_key() for _ in depths]
    sizes = [count(fact.text) for fact in facts]
    reserve = max((count(ask.question + ask.answer) for fact in facts for ask in fact.asks), default=0)
    length, after = num_tokens - reserve, sum(sizes)
    if document.num_tokens + after > length:
        raise ValueError(
            f"{len(facts)} facts of {after} tokens do not fit in {num_tokens} tokens with a question and its answer of "
            f"{reserve}: raise num_tokens or plant fewer"
        )
    for depth, fact, size in zip(depths, facts, sizes, strict=True):
        wish, latest = round(depth * length), length - after
        document.fill(min(wish, latest), strictly=wish + SENTENCE_TOKENS > latest)
        document.add(fact, wished=True)
        after -= size
    document.fill(length, strictly=True)
    return document


def _parse(template: str) -> list[str | list[str]]:
    """ "The {adj} boat." -> ["The", [" ancient", ...], " boat."]: constant parts and choices."""
    parts = re.split(r"( ?\{\w+\})", template)
    return [[" " + word for word in WORDS[part.strip(" {}")]] if "{" in part else part for part in parts if part]


_SENTENCES = [_parse(template) for template in _FILE["sentences"].splitlines() if template]
