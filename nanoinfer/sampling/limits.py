"""Which tokens a row may draw: logit_bias, allowed_token_ids and bad_words, as tables that take a kernel a few loads.

A row has one line, uploaded when its sequence gets the row. What depends on the row's last tokens is kept up to date on
the device: the host runs a step ahead and does not know them.

Two bit masks say what concerns a token. `allowed` has a bit for each token of the vocabulary that may come at all.
`listed` has one for each token with a *slot*, whose number is how many listed tokens have a smaller id; a slot holds a
bias, and the step in which its token would complete a bad word.

Bad words of several tokens are found by the Shift-And method (Baeza-Yates and Gonnet, 1992). Each token of a word but
its last is in a list. It matches if it is the token just drawn, and the one before it in the same word matched in the
step before. The last one that is listed of a word, once it matches, blocks the word's last token in the next step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from nanoinfer.sampling_params import MAX_BIASED
from nanoinfer.structured.matcher import Grammar

MAX_BAD_TOKENS = 2048
"""Most tokens in all bad words of several tokens of a row. Those of one token are bits in a mask: any number."""
MAX_SLOTS = MAX_BIASED + MAX_BAD_TOKENS // 2
BEGINS_WORD = 1 << 30
"""Added to the first token of a word: none comes before it."""
NO_SLOT = -1
NEVER = -1
LISTED_BITS = 16
"""Tokens in a word of `listed`: its lower bits are theirs, its higher bits the slots of all tokens before them."""


@lru_cache
def line_type(vocab_size: int) -> np.dtype:
    """Return what a row's line holds, the one declaration for upload, reference and kernels.

    What depends on the vocabulary comes last, so that the kernels know where the rest lies.
    """
    return np.dtype(
        [
            ("bias", np.float32, MAX_SLOTS),
            ("blocked_at", np.int32, MAX_SLOTS),  # the step in which the slot's token would complete a bad word
            ("bad_tokens", np.int32, MAX_BAD_TOKENS),  # of each word all but the last, the first with `BEGINS_WORD`
            ("blocks", np.int16, MAX_BAD_TOKENS),  # the slot that the token blocks if it matches, or `NO_SLOT`
            ("matched", np.int8, 2 * MAX_BAD_TOKENS),  # whether the token matches, for even steps and for odd ones
            ("allowed", np.int32, -(-vocab_size // 32)),  # a bit per token, the lowest of the first word first
            ("listed", np.int32, -(-vocab_size // LISTED_BITS)),
        ]
    )


def line_words(vocab_size: int) -> int:
    """Return the length of a row's line, in words of 32 bits."""
    return line_type(vocab_size).itemsize // 4


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """What a request asks of the choice of tokens, as token ids. The engine has checked them against its vocabulary."""

    bias: tuple[tuple[int, float], ...] = ()
    """Of each biased id what is added to its logit."""
    allowed: tuple[int, ...] | None = None
    """The only ids that may come; None: all."""
    words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come: behind all but the last of its tokens, the last one is banned."""

    grammar: Grammar | None = None
    """What the tokens must follow. Its masks are made on the host, step by step; no line holds them."""

    @cached_property
    def in_line(self) -> TokenLimits | None:
        """What a row's line holds of it; None: nothing."""
        return replace(self, grammar=None) if self.bias or self.words or self.allowed is not None else None

    @property
    def banned(self) -> set[int]:
        """The ids that never come: bad words of one token."""
        return {word[0] for word in self.words if len(word) == 1}

    @cached_property
    def is_masked(self) -> bool:
        """Whether the mask of allowed tokens says anything."""
        return self.allowed is not None or bool(self.banned)

    @cached_property
    def long_words(self) -> list[tuple[int, ...]]:
        """Bad words of several tokens, each once."""
        return [word for word in dict.fromkeys(self.words) if len(word) > 1]

    @cached_property
    def listed(self) -> list[int]:
        """The ids with a slot, in the order of the slots."""
        return sorted({token_id for token_id, _ in self.bias} | {word[-1] for word in self.long_words})

    @cached_property
    def num_bad_tokens(self) -> int:
        """How many tokens bad words of several tokens have, but for the last of each."""
        return sum(len(word) - 1 for word in self.long_words)

    def line(self, vocab_size: int, output_token_ids: Collection[int]) -> np.ndarray:
        """Return the line of a row whose sequence has generated these tokens, in their order: [line_words] int32."""
        line = np.zeros((), dtype=line_type(vocab_size))
        allowed = np.zeros(32 * line["allowed"].size, dtype=np.uint8)
        allowed[:vocab_size] = self.allowed is None
        allowed[list(self.allowed or ())] = 1
        allowed[list(self.banned)] = 0
        line["allowed"] = np.packbits(allowed, bitorder="little").view(np.int32)
        slots = {token_id: slot for slot, token_id in enumerate(self.listed)}
        bits = np.zeros(LISTED_BITS * line["listed"].size, dtype=np.uint8)
        bits[self.listed] = 1
        in_word = bits.reshape(-1, LISTED_BITS).sum(axis=1, dtype=np.int64)
        words = np.packbits(bits, bitorder="little").view(np.uint16) | (np.cumsum(in_word) - in_word) << LISTED_BITS
        line["listed"] = words.astype(np.int32)  # a slot has 11 bits: the sign bit is free
        for token_id, bias in self.bias:
            line["bias"][slots[token_id]] = bias
        self._write_words(line, slots, tuple(output_token_ids))
        return line.reshape(1).view(np.int32)

    def _write_words(self, line: np.ndarray, slots: dict[int, int], output: tuple[int, ...]) -> None:
        step, end = len(output), 0
        line["blocked_at"], line["blocks"] = NEVER, NO_SLOT
        matched = line["matched"].reshape(2, MAX_BAD_TOKENS)[step % 2]
        for word in self.long_words:
            begin, end = end, end + len(word) - 1
            line["bad_tokens"][begin:end] = word[:-1]
            line["bad_tokens"][begin] |= BEGINS_WORD
            line["blocks"][end - 1] = slots[word[-1]]
            for length in range(1, len(word)):
                matched[begin + length - 1] = output[-length:] == word[:length]
            if matched[end - 1]:
                line["blocked_at"][slots[word[-1]]] = step
