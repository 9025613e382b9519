"""The text that the "recall" model is trained on: of pass keys, tables, passages and counts. What they look like and
how they are asked about: docs/recall.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from nanoinfer.recall.text import ANSWER, WORDS, Ask, Author, Document, Fact, write_document

KINDS = ("pass_key", "table", "passage", "count")
# Where less space than this is left before a place that must be met, no table or passage is begun.
LONG_PART_TOKENS = 150

PLACES = """
Alder Arden Barrow Beckett Belford Brackley Caldwell Camden Carlow Clifton Corwen Dalby Darley Denby Dunmore Eastleigh
Elmsford Fairford Fenwick Garvie Glenrock Hadley Harwich Hexham Ilford Kelso Kempsey Kilburn Kirkham Lambton Langley
Leyburn Lindale Malton Marsden Melrose Norby Oakham Orford Penrith Pickering Quorn Redcar Renfrew Ripley Selby Skipton
Stanhope Tarbert Thirsk Tiverton Ullapool Wareham Welford Whitby Wickham Winslow Witney Yarrow Yeovil
""".split()
VENUES = "market harbour mill fair school station brewery museum hospital library quarry vineyard".split()

ITEMS = """
apples pears plums cherries lemons onions carrots beans turnips radishes loaves cakes barrels baskets bottles candles
blankets buckets hammers nails ropes saddles kettles spoons plates lanterns mirrors pencils notebooks ribbons
""".split()

# The two parts of a passage's title.
TITLE_COLOURS = """
Amber Azure Black Bronze Copper Coral Crimson Emerald Golden Green Grey Indigo Ivory Jade Lilac Maroon Ochre Olive
Orange Pearl Pink Purple Ruby Russet Saffron Scarlet Silver Violet White Yellow
""".split()
TITLE_THINGS = """
Anchor Arrow Badger Beacon Bridge Castle Cedar Comet Crown Eagle Falcon Feather Forest Fountain Garden Gate Glacier
Heron Island Lantern Meadow Mountain Orchard Otter Palace Raven River Shield Sparrow Tower
""".split()

# Singular and plural of what is counted.
COUNTED = [
    (one, one + "s")
    for one in "boat cart letter goat guest parcel swan tram pilgrim crate horse balloon".split()
]  # fmt: skip

# The words of filler sentences.
FILLER = ("adj", "person", "verb", "thing", "spot", "adv", "time", "weather")
FILLER_WORDS = [word for name in FILLER for word in WORDS[name]]


def all_words() -> list[str]:
    """Return every word that a text may have, those that stand in a template aside."""
    names = [word for name in ("first_names", "last_names") for word in WORDS[name]]
    own = [*PLACES, *VENUES, *ITEMS, *TITLE_COLOURS, *TITLE_THINGS]
    return names + own + FILLER_WORDS + [word for pair in COUNTED for word in pair]


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


class TrainingAuthor(Author):
    """Writes facts of all kinds. No two of them have the same subject, counts aside.

    Args:
        names: at most this many first names and as many last names are used. The fewer, the more often each recurs;
            where their combinations run out, all names are used.
    """

    def __init__(self, rng: Random, names: int | None = None, mix: Mix = Mix()) -> None:
        super().__init__(rng)
        (first, last), self.mix = self.names[0], mix
        some = tuple(_some(rng, choices, len(choices) if names is None else names) for choices in (first, last))
        self.names = [some, (first, last)]
        self._running = [[one, many, int(rng.random() * 90)] for one, many in COUNTED]

    def distractor(self, room: int) -> Fact | None:
        kind = self.mix.draw(self.rng, short=room < LONG_PART_TOKENS)
        return self.fact(kind) if kind else None

    def fact(self, kind: str) -> Fact:
        """Return the next fact of that kind.

        Raises:
            ValueError: there is no such kind, or no name for another fact is left.
        """
        if kind not in KINDS:
            raise ValueError(f'no kind of fact is called "{kind}": {", ".join(KINDS)} are')
        return getattr(self, kind)()

    def table(self) -> Fact:
        name = self.unused("table", (PLACES, VENUES))
        text, asks = ["\nTable of the", *name, ":"], []
        for item in _some(self.rng, ITEMS, 3 + int(self.rng.random() * 4)):
            number = self.digits(3)
            text += ["\n-", " " + item, ":", " ", *number]
            question = ["\nQuestion: What is the number of", " " + item, " in the table of the", *name, "?" + ANSWER]
            asks.append(Ask(question, [" " + item, ":", " "], number, []))
        return Fact(("table", *name), [*text, "\n"], asks)

    def passage(self) -> Fact:
        name = self.unused("passage", (TITLE_COLOURS, TITLE_THINGS))
        number = 20 + int(self.rng.random() ** 2 * 41)  # 20 to 60, short ones more often
        body = [" " + self.pick(FILLER_WORDS) for _ in range(number)] + ["."]
        question = ["\nQuestion: Repeat the passage called", *name, "." + ANSWER]
        return Fact(("passage", *name), ["\nPassage", *name, ":", *body], [Ask(question, [], body, [])])

    def count(self) -> Fact:
        """Return what an arrival makes of a count. It makes the asks about earlier ones void."""
        running = self.pick(self._running)
        running[2] += 1
        one, many, number = running
        lead, value = [" The count of", " " + many, " is now", " "], [*str(number)]
        question = ["\nQuestion: What is the count of", " " + many, " now?" + ANSWER]
        event = [self.start() + "A", " " + one, " arrives."]
        return Fact(("count", many), [*event, *lead, *value, "."], [Ask(question, lead, value, ["."])])


@dataclass(frozen=True)
class Question:
    """prompt_text: document and question; answer_text: the whole answer; depth: where the fact begins, from 0 to 1."""

    prompt_text: str
    answer_text: str
    kind: str
    depth: float


def make_document(
    seed: int, num_tokens: int, count_tokens: Callable[[str], int], depths: Sequence[float] = (), mix: Mix = Mix()
) -> Document:
    """Return a document with pass keys at those depths, see `write_document`, and whatever else is in the mix."""
    return write_document(TrainingAuthor(Random(seed), mix=mix), num_tokens, count_tokens, depths)


def questions(document: Document, *, wished: bool = True) -> list[Question]:
    """Return all questions. wished: only those about facts that were wished for."""
    last = {at.fact.subject: at for at in document.planted}
    text = document.text
    return [
        Question(text + "".join(ask.question), "".join(ask.answer), at.fact.subject[0], at.start / document.num_tokens)
        for at in document.planted
        if last[at.fact.subject] is at and (at.wished or not wished)
        for ask in at.fact.asks
    ]


def _some(rng: Random, choices: Sequence[str], number: int) -> list[str]:
    """Different ones, in random order. `Random.sample` may change between versions of Python."""
    pool = list(choices)
    number = min(number, len(pool))
    for i in range(number):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:number]
