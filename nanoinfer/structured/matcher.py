"""Grammars that are compiled, and how far each sequence has come in its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which any number of sequences may follow.

    Attributes:
        initial: llguidance's matcher, before the first token.
        known: [words of a mask] int32, a bit for each token that tokenizer and model both have.
        num_bits: of a mask of llguidance.
    """

    initial: Any
    known: np.ndarray
    num_bits: int

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask of llguidance, at least as many as in `known`."""
        return -(-self.num_bits // 32)


class Matcher:
    """How far a sequence has come in its grammar. It follows the tokens that were read.

    Args:
        end_token_ids: what ends the sequence: end tokens and stop_token_ids.
        min_tokens: before that many tokens these do not come, unless nothing else is left.
        suppressed: tokens that never come, whatever the grammar takes.
    """

    def __init__(
        self, grammar: Grammar, end_token_ids: Collection[int], min_tokens: int, suppressed: Collection[int] = ()
    ) -> None:
        self.grammar, self._min_tokens = grammar, min_tokens
        self._state: Any = None  # copied when it is first needed
        self._num_read = 0
        self._ends = mask_of(end_token_ids, len(grammar.known)) if min_tokens else None
        self._suppressed = mask_of(suppressed, len(grammar.known)) if suppressed else None

    def read(self, token_ids: Sequence[int], begin: int) -> Any:
        """Go on to behind all tokens of a sequence, and return llguidance's matcher. begin: where its output begins.

        Raises:
            ValueError: a token does not go on from where the grammar is.
        """
        if self._state is None:
            self._state = self.grammar.initial.deep_copy()
        if new := list(token_ids[begin + self._num_read :]):
            self._num_read += len(new)
            self._state.consume_tokens(new)
        self._check()
        return self._state

    def narrow(self, words: np.ndarray) -> None:
        """Take from the mask that llguidance has made, [words of `grammar.known`] int32, whatever else may not come.

        Raises:
            ValueError: the grammar has met a limit, or nothing is left.
        """
        self._check()
        words &= self.grammar.known
        if self._suppressed is not None and words.any():
            words &= ~self._suppressed
            if not words.any():
                raise ValueError(
                    "structured_outputs: the grammar takes only tokens here that the checkpoint's suppress_tokens "
                    "(generation_config.json) forbids: the text so far is cut off"
                )
        if self._ends is not None and self._num_read < self._min_tokens:
            others = words & ~self._ends
            if others.any():
                words[:] = others
        if not words.any():
            raise ValueError("structured_outputs: no token of this model goes on from here; the text so far is cut off")

    def ahead(self, token_ids: Sequence[int], begin: int, draft: Sequence[int]) -> list[np.ndarray]:
        """Return the mask behind each token of a draft, as far as the grammar takes these and does not end: each
        [words of `grammar.known`] int32. The matcher stays where it is.

        token_ids, begin: as for `read`.
        """
        state, masks = self.read(token_ids, begin).deep_copy(), []
        num_read = self._num_read
        try:
            for token_id in draft[: state.validate_tokens(list(draft))]:
                state.consume_tokens([token_id])
                if state.is_stopped() or state.is_error():
                    break
                words = np.zeros(self.grammar.num_words, dtype=np.int32)
                state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                self._num_read += 1
                self.narrow(words[: len(self.grammar.known)])
                masks.append(words[: len(self.grammar.known)])
        except ValueError:
            pass  # nothing may come behind this token: whoever takes it is told
        finally:
            self._num_read = num_read
        return masks

    def _check(self) -> None:
        if self._state.is_error():
            reason = self._state.get_error().split("\n")[0]
            raise ValueError(f"structured_outputs: the grammar cannot go on from here ({reason}): give a simpler one")


def mask_of(token_ids: Collection[int], num_words: int) -> np.ndarray:
    """Return a mask with the bits of these tokens, the lowest of the first word first: [num_words] int32."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    ids = np.fromiter(token_ids, dtype=np.int64)
    bits[ids[ids < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
