"""Text with facts in it and questions about them, each with exactly one right answer.

The four kinds of fact, their questions and answers: docs/recall.md. Answers come in the words of the fact: models learn
to look up what stands in the same words long before anything else.

Text is written as fragments, which join to it. A fragment ends where the recall tokenizer ends a token in any case, so
fragments can be tokenised one by one and counted apart. The same seed gives the same text in every version of Python:
only `Random.random` is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from nanoinfer.recall import words

KINDS = ("pass_key", "table", "passage", "count")
HEADING = "Records."
ANSWER = "\nAnswer:"
# Where less space than this is left before a place that must be met, no table or passage is begun.
LONG_PART_TOKENS = 150
# No filler sentence is longer, in tokens of the recall tokenizer.
SENTENCE_TOKENS = 16
# No sentence about a count is longer.
COUNT_TOKENS = 16

Fragments = list[str]


@dataclass(frozen=True)
class Ask:
    """A question about a fact: from "\\nQuestion:" to "\\nAnswer:". The answer is a lead, which starts with a space or
    is empty, the value, which must be looked up, and a tail."""

    question: Fragments
    value: Fragments
    lead: Fragments = field(default_factory=list)
    tail: Fragments = field(default_factory=list)

    @property
    def answer(self) -> Fragments:
        return self.lead + self.value + self.tail


@dataclass(frozen=True)
class Fact:
    """A fact as it stands in the text. A later fact with the same subject makes this one's asks void."""

    kind: str
    subject: tuple[str, ...]
    text: Fragments
    asks: list[Ask]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Which share of a document's parts is of which kind; all others are filler sentences."""

    pass_key: float = 0.08
    table: float = 0.01
    passage: float = 0.01
    count: float = 0.03

    def draw(self, rng: Random, short: bool = False) -> str | None:
        """A kind, or None for filler. short: no kind of many tokens."""
        x = rng.random()
        for kind in KINDS:
            x -= getattr(self, kind)
            if x < 0:
                return None if short and kind in ("table", "passage") else kind
        return None


class Author:
    """Writes the parts of one document. No two facts have the same subject, counts aside.

    Args:
        names: at most this many first names and as many last names are used. The fewer, the more often each recurs;
            where their combinations run out, all names are used.
    """

    def __init__(self, rng: Random, names: int = len(words.FIRST_NAMES)) -> None:
        self.rng = rng
        self._first = _some(rng, words.FIRST_NAMES, names)
        self._last = _some(rng, words.LAST_NAMES, names)
        self._used: set[tuple[str, ...]] = set()
        self._running = [[one, many, int(rng.random() * 90)] for one, many in words.COUNTED]

    def filler(self) -> Fragments:
        """Return a sentence without a fact."""
        random = self.rng.random
        template = _SENTENCES[int(random() * len(_SENTENCES))]
        text = [part if type(part) is str else part[int(random() * len(part))] for part in template]
        text[0] = self._start() + text[0]
        return text

    def fact(self, kind: str) -> Fact:
        """Return the next fact of that kind.

        Raises:
            ValueError: there is no such kind, or no name for another fact is left.
        """
        if kind not in KINDS:
            raise ValueError(f'no kind of fact is called "{kind}": {", ".join(KINDS)} are')
        return getattr(self, "_" + kind)()

    def last_count(self) -> Fact:
        """Return a count that no later fact of this author moves on."""
        if len(self._running) == 1:  # the other facts need one that goes on
            raise ValueError(f"a document has at most {len(words.COUNTED) - 1} planted counts")
        return self._count(last=True)

    def _pass_key(self) -> Fact:
        pools = (self._first, self._last), (words.FIRST_NAMES, words.LAST_NAMES)
        name = self._unused("pass_key", *pools)
        key, lead = self._digits(5), ["The pass key of", *name, " is", " "]
        question = ["\nQuestion: What is the pass key of", *name, "?" + ANSWER]
        return self._stated("pass_key", ("pass_key", *name), question, lead, key)

    def _table(self) -> Fact:
        name = self._unused("table", (words.PLACES, words.VENUES))
        text, asks = ["\nTable of the", *name, ":"], []
        for item in _some(self.rng, words.ITEMS, 3 + int(self.rng.random() * 4)):
            number = self._digits(3)
            text += ["\n-", " " + item, ":", " ", *number]
            question = ["\nQuestion: What is the number of", " " + item, " in the table of the", *name, "?" + ANSWER]
            asks.append(Ask(question, number, lead=[" " + item, ":", " "]))
        text.append("\n")
        return Fact("table", ("table", *name), text, asks)

    def _passage(self) -> Fact:
        name = self._unused("passage", (words.TITLE_COLOURS, words.TITLE_THINGS))
        number = 20 + int(self.rng.random() ** 2 * 41)  # 20 to 60, short ones more often
        body = [" " + self._pick(_PASSAGE_WORDS) for _ in range(number)] + ["."]
        question = ["\nQuestion: Repeat the passage called", *name, "." + ANSWER]
        return Fact("passage", ("passage", *name), ["\nPassage", *name, ":", *body], [Ask(question, body)])

    def _count(self, last: bool = False) -> Fact:
        place = int(self.rng.random() * len(self._running))
        running = self._running.pop(place) if last else self._running[place]
        running[2] += 1
        one, many, number = running
        lead = ["The count of", " " + many, " is now", " "]
        question = ["\nQuestion: What is the count of", " " + many, " now?" + ANSWER]
        event = [self._start() + "A", " " + one, " arrives."]
        return self._stated("count", ("count", many), question, lead, [*str(number)], event)

    def _stated(
        self, kind: str, subject: tuple[str, ...], question: Fragments, lead: Fragments, value: Fragments,
        before: Fragments | None = None,
    ) -> Fact:  # fmt: skip
        """A fact that is one sentence, which is also the answer. before: sentences in front of it."""
        first = before + [" " + lead[0]] if before else [self._start() + lead[0]]
        ask = Ask(question, value, lead=[" " + lead[0], *lead[1:]], tail=["."])
        return Fact(kind, subject, [*first, *lead[1:], *value, "."], [ask])

    def _unused(self, kind: str, *pools: tuple[Sequence[str], Sequence[str]]) -> Fragments:
        """Return a pair from the first of the pools in which one is easily found."""
        for first, last in pools:
            for _ in range(50):
                pair = [" " + self._pick(first), " " + self._pick(last)]
                if (kind, *pair) not in self._used:
                    self._used.add((kind, *pair))
                    return pair
        raise ValueError(f"the document has too many facts of the kind {kind}: lower its share or the length")

    def _start(self) -> str:
        """Return what parts a sentence from the one before."""
        return "\n" if self.rng.random() < 0.15 else " "

    def _pick(self, choices: Sequence[str]) -> str:
        return choices[int(self.rng.random() * len(choices))]

    def _digits(self, number: int) -> Fragments:
        """So many digits; the first one is not 0."""
        low = 10 ** (number - 1)
        return [*str(low + int(self.rng.random() * 9 * low))]


@dataclass(frozen=True)
class Planted:
    """A fact in a document. start: its first token, counted from the document's; wished: the caller asked for it."""

    fact: Fact
    start: int
    wished: bool


@dataclass(frozen=True)
class Question:
    """prompt_text: document and question; answer_text: the whole answer; depth: where the fact begins, from 0 to 1."""

    prompt_text: str
    answer_text: str
    kind: str
    depth: float


@dataclass(frozen=True)
class Document:
    """A text of `num_tokens` tokens and the facts in it, in their order, but those that a later one made void."""

    text: str
    num_tokens: int
    planted: list[Planted]

    def questions(self, *, wished: bool = True) -> list[Question]:
        """Return all questions. wished: only about facts that the caller wished for."""
        return [
            Question(self.text + "".join(ask.question), "".join(ask.answer), at.fact.kind, at.start / self.num_tokens)
            for at in self.planted
            if at.wished or not wished
            for ask in at.fact.asks
        ]


def write_document(
    seed: int,
    num_tokens: int,
    count_tokens: Callable[[str], int],
    plant: Sequence[tuple[str, float]] = (),
    mix: Mix = Mix(),
) -> Document:
    """Return a document that, with any question about its wished facts, has `num_tokens` tokens or a sentence less.

    Args:
        num_tokens: without special tokens, such as the one that the tokenizer puts in front.
        count_tokens: tokens of a fragment, without special tokens.
        plant: kind and relative depth (0 to 1) of each fact wished for, of any number and in any order. The first token
            of a fact lies half a sentence from that depth at most, or as far as the other wished facts need to fit:
            those of the same depth follow each other, and those of depth 1 end the document.
        mix: what else is in the document. All facts of the mix are distractors.

    Raises:
        ValueError: the wished facts do not fit, or a depth or kind is not allowed.
    """
    count_tokens = cache(count_tokens)
    draft = _Draft(Author(Random(seed)), mix, lambda fragments: sum(map(count_tokens, fragments)))
    wished = sorted(plant, key=lambda item: item[1])
    for kind, depth in wished:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth {depth} of a {kind} is not in [0, 1]")
    # Names and sizes of the wished facts are needed before the text, a count's number only when its turn comes.
    facts = [None if kind == "count" else draft.author.fact(kind) for kind, _ in wished]
    samples = [Author(Random(0)).fact(kind) for kind in ({kind for kind, _ in wished} or KINDS)]
    sizes = [COUNT_TOKENS if fact is None else draft.count(fact.text) for fact in facts]
    reserve = max(draft.count(ask.question) for fact in [*samples, *filter(None, facts)] for ask in fact.asks)
    length, after = num_tokens - reserve, sum(sizes)
    if draft.position + after > length:
        raise ValueError(
            f"{len(wished)} facts of {after} tokens do not fit in {num_tokens} tokens with a question of {reserve}: "
            "raise num_tokens or plant fewer"
        )
    for (_, depth), fact, size in zip(wished, facts, sizes):
        wish, latest = round(depth * length), length - after
        draft.fill(min(wish, latest), strictly=wish + SENTENCE_TOKENS > latest)
        draft.add_fact(fact or draft.author.last_count(), wished=True)
        after -= size
    draft.fill(length, strictly=True)
    return draft.document()


class _Draft:
    """A document that grows. position: its tokens so far."""

    def __init__(self, author: Author, mix: Mix, count: Callable[[Fragments], int]) -> None:
        self.author, self.count = author, count
        self._mix = mix
        self._text: Fragments = [HEADING]
        self._planted: list[Planted] = []
        self.position = count([HEADING])

    def fill(self, target: int, *, strictly: bool) -> None:
        """Add filler and distractors until `target` tokens are half a sentence away at most.

        strictly: stay below the target, and stop where no sentence is short enough.
        """
        failures = 0
        while self.position < target and failures < 8:
            left = target - self.position
            # An event that was drawn has moved its count, so none is drawn where it might not fit.
            roomy = left > 2 * SENTENCE_TOKENS
            kind = self._mix.draw(self.author.rng, short=left < LONG_PART_TOKENS) if roomy else None
            if kind:
                self.add_fact(self.author.fact(kind), wished=False)
                continue
            text = self.author.filler()
            size = self.count(text)
            if size > (left if strictly else 2 * left):
                failures += 1
            else:
                self._add(text, size)

    def add_fact(self, fact: Fact, *, wished: bool) -> None:
        self._planted.append(Planted(fact, self.position, wished))
        self._add(fact.text, self.count(fact.text))

    def _add(self, text: Fragments, size: int) -> None:
        self._text += text
        self.position += size

    def document(self) -> Document:
        last = {at.fact.subject: at for at in self._planted}
        planted = [at for at in self._planted if last[at.fact.subject] is at]
        return Document("".join(self._text), self.position, planted)


def _some(rng: Random, choices: Sequence[str], number: int) -> list[str]:
    """Different ones, in random order. `Random.sample` may change between versions of Python."""
    pool = list(choices)
    number = min(number, len(pool))
    for i in range(number):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:number]


def _parse(template: str) -> list[str | list[str]]:
    """ "The {adj} boat." -> ["The", [" ancient", ...], " boat."]: constant parts and choices."""
    parts = re.split(r"( ?\{\w+\})", template)
    return [_CHOICES[part.strip(" {}")] if "{" in part else part for part in parts if part]


_LISTS = dict(
    adj=words.ADJECTIVES, person=words.PEOPLE, verb=words.VERBS, thing=words.THINGS, spot=words.SPOTS,
    adv=words.ADVERBS, time=words.TIMES, weather=words.WEATHER,
)  # fmt: skip
_CHOICES = {name: [" " + word for word in choices] for name, choices in _LISTS.items()}
_SENTENCES = [_parse(template) for template in words.SENTENCES]
_PASSAGE_WORDS = [word for choices in _LISTS.values() for word in choices]
