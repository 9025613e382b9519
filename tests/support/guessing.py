"""A drafter that knows what comes, and says it, something else, or both at random."""

from __future__ import annotations

import random

from engines import VOCAB, run

from nanoinfer import LLMEngine, SamplingParams


class Guessing:
    """Drafts for requests whose answers are known.

    Args:
        texts: the tokens of each sequence, prompt and answer.
    """

    num_bytes = 0

    def __init__(self, generator: random.Random, texts: list[list[int]]) -> None:
        self._generator, self._texts = generator, texts

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> list[int]:
        generator, length = self._generator, len(token_ids)
        found = next((text for text in self._texts if text[:length] == token_ids), token_ids)
        if most == 1:  # so it is asked, too, whether there will be a draft
            return found[length : length + 1]
        draft = found[length : length + generator.randint(0, most)]
        kind = generator.choice(["right", "right", "wrong from a place on", "too long"])
        if kind == "wrong from a place on" and draft:
            place = generator.randrange(len(draft))
            draft[place:] = [generator.randrange(3, VOCAB) for _ in draft[place:]]
        if kind == "too long":
            draft = (draft + [generator.randrange(3, VOCAB) for _ in range(most)])[:most]
        return draft

    def keep(self, sequence_ids: set[int]) -> None:
        """It keeps nothing of sequences."""


class Right(random.Random):
    """Has all be drafted that may be, and nothing that is wrong."""

    def randint(self, least, most):
        return most

    def choice(self, kinds):
        return kinds[0]


def guess(
    engine: LLMEngine, plain: LLMEngine, requests: list[tuple[list[int], SamplingParams]], generator: random.Random
) -> list:
    """Have an engine draft from what a plain one gives; return that."""
    outcomes = run(plain, *map(list, zip(*requests, strict=True)))
    texts = [[*prompt, *tokens] for (prompt, _), found in zip(requests, outcomes, strict=True) for tokens, *_ in found]
    engine.drafts.drafter = Guessing(generator, texts)
    return outcomes


def check_alone(
    engine: LLMEngine, pairs: list[tuple[list[int], SamplingParams]], outcomes: list, seed: int
) -> list[int]:
    """Run requests one by one with drafts of what they are known to say; return how many of each were right."""
    texts = [[*prompt, *tokens] for (prompt, _), found in zip(pairs, outcomes, strict=True) for tokens, *_ in found]
    engine.drafts.drafter, counts = Guessing(random.Random(seed), texts), []
    for (prompt, params), wanted in zip(pairs, outcomes, strict=True):
        before = engine.drafts.num_accepted
        assert run(engine, [prompt], [params]) == [wanted]
        counts.append(engine.drafts.num_accepted - before)
    return counts
