"""How many tokens a sequence may think, and how its thinking is ended when they are used up."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.thinking import Bounds
from nanoinfer.requests.detokenizer import REPLACEMENT_CHARACTER, TokenTexts

FIELD = "thinking_token_budget"
# Of UTF-8: a character that has begun has so many more tokens at most.
_MAX_MORE = 3


class ThinkingEnd:
    """The tokens with which thinking is ended, for all requests.

    Args:
        bounds: the texts around what is thought.
        texts: of single tokens.

    Attributes:
        token_ids: of the text that ends it.
        again: of the text that ends it where it has begun again.

    Raises:
        RequestError: the tokenizer cannot write one of the texts.
    """

    def __init__(self, bounds: Bounds, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> None:
        self.bounds, self.tokenizer, self.texts = bounds, tokenizer, texts
        self.token_ids = self._written(bounds.written)
        self.again = self._written(bounds.again) if bounds.again is not None else None
        self.longest = max(map(len, (bounds.begin, *bounds.ends)))

    def _written(self, text: str) -> tuple[int, ...]:
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if text not in "".join(self.texts[token_id] for token_id in token_ids):
            raise RequestError(
                f"{FIELD} is not possible: the tokenizer cannot write {text!r}: leave it out", field=FIELD
            )
        return token_ids

    def is_inside(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token is part of a character that is to be continued, as far as can be told."""
        how = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self.tokenizer.decode(list(token_ids), **how).endswith(REPLACEMENT_CHARACTER)


class _State(enum.Enum):
    BEFORE = "before"  # nothing is thought yet, but may be
    THINKING = "thinking"
    ENDING = "ending"  # the next tokens are those that end it
    OVER = "over"


class ThinkingBudget:
    """How far a sequence has come in its thinking. It follows the tokens that were read.

    The tokens behind the text that begins what is thought count. When there are `budget` of them, the text that ends it
    comes next; inside a character, up to 3 tokens later.

    Args:
        is_thinking: the prompt has begun it.
    """

    def __init__(self, end: ThinkingEnd, budget: int, *, is_thinking: bool) -> None:
        self._end, self._budget = end, budget
        self._num_read = self._num_thought = 0
        self._text = ""  # the end of what was read, in which a bound may have begun
        self._ending, self._num_ended = end.token_ids, 0  # what ends it, and how many of these came last
        self._recent: list[int] = []  # the last tokens that were thought
        self._state = _State.BEFORE
        if is_thinking:
            self._begin("")

    def may_end(self, token_ids: Sequence[int], begin: int, num_pending: int) -> bool:
        """Whether the next token may have to be one that ends the thinking.

        Args:
            token_ids: all tokens that were read; from `begin` on they are the output.
            num_pending: how many further ones were sampled.
        """
        self._read(token_ids, begin)
        return self._state is not _State.OVER and self._num_thought + num_pending >= self._budget

    def next_token(self, token_ids: Sequence[int], begin: int) -> int | None:
        """Return the token that must come next, where all tokens were read; None: any may."""
        self._read(token_ids, begin)
        return self._ending[self._num_ended] if self._state is _State.ENDING else None

    def _read(self, token_ids: Sequence[int], begin: int) -> None:
        while begin + self._num_read < len(token_ids) and self._state is not _State.OVER:
            self._take(token_ids[begin + self._num_read])
            self._num_read += 1

    def _take(self, token_id: int) -> None:
        bounds, self._text = self._end.bounds, self._text + self._end.texts[token_id]
        if self._state is _State.BEFORE:
            self._look_for_begin()
            return
        self._num_thought += 1
        self._recent = [*self._recent, token_id][-max(len(self._ending), _MAX_MORE + 1) :]
        if self._state is _State.ENDING:
            self._num_ended = self._num_come()
            if self._num_ended == len(self._ending):
                self._over()
            elif not self._num_ended:  # another token came: the form of the answer does not let thinking end here
                self._state = _State.THINKING
        if self._state is _State.THINKING and any(end in self._text for end in bounds.ends):
            self._over()
        self._text = self._text[-self._end.longest :]
        self._end_if_used_up()

    def _look_for_begin(self) -> None:
        begin = self._end.bounds.begin
        if self._end.again is not None:  # messages may come before
            _, found, rest = self._text.rpartition(begin)
            if found:
                self._begin(rest)
            else:
                self._text = self._text[-self._end.longest :]
        elif (text := self._text.lstrip()).startswith(begin):
            self._begin(text.removeprefix(begin))
        elif not begin.startswith(text):
            self._state = _State.OVER

    def _begin(self, text: str) -> None:
        self._state, self._text, self._recent = _State.THINKING, text, []
        self._end_if_used_up()

    def _over(self) -> None:
        """Thinking has ended."""
        self._state = _State.OVER if self._end.again is None else _State.BEFORE
        if self._end.again is not None and self._num_thought >= self._budget:
            self._ending = self._end.again

    def _end_if_used_up(self) -> None:
        if self._state is not _State.THINKING or self._num_thought < self._budget:
            return
        if self._num_thought < self._budget + _MAX_MORE and self._end.is_inside(self._recent[-_MAX_MORE - 1 :]):
            return
        self._state, self._num_ended = _State.ENDING, self._num_come()

    def _num_come(self) -> int:
        """How many of the tokens that end it came last."""
        longest = min(len(self._recent), len(self._ending))
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if tuple(self._recent[-size:]) == self._ending[:size]), 0)
