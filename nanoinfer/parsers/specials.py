"""Special tokens in the text of an answer: those that mean nothing to a parser are left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

# A character that no text has (Unicode keeps it for such use). Behind the first character of a text that only looks
# like a special token, it keeps parsers from taking it for one; `unguarded` takes it out again.
_GUARD = "\ufdd0"


def unguarded(text: str) -> str:
    """Return the text as it was generated."""
    return text.replace(_GUARD, "") if _GUARD in text else text


@dataclass(frozen=True)
class Specials:
    """The special tokens of a vocabulary: by their texts, the ids.

    Attributes:
        meant: texts that mean something to a parser; special tokens that are part of one are kept.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    meant: tuple[str, ...] = ()

    @cached_property
    def kept(self) -> frozenset[str]:
        """The special tokens that a parser needs to see."""
        return frozenset(text for text in self.ids if text and any(text in meant for meant in self.meant))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        texts = sorted(filter(None, self.ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @cached_property
    def beginnings(self) -> frozenset[str]:
        return frozenset(text[:size] for text in self.ids for size in range(1, len(text)))

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids), default=0)


class SpecialFilter:
    """Leaves special tokens out of a text in which they were written, but for those that are kept.

    A text that looks like a special token and is none, for its token did not come, is ordinary text and stays. Without
    token ids all are taken for special tokens.

    Args:
        drops: False: nothing is left out, as the client wants to see them.
    """

    def __init__(self, specials: Specials, *, drops: bool = True) -> None:
        self._specials, self._drops = specials, drops
        self._names = {token_id: text for text, token_id in specials.ids.items()}
        self._held = ""
        self._come: Counter[str] = Counter()  # special tokens that came and were not found in the text yet
        self._has_ids = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """Take more text with the tokens that were generated meanwhile; return what is known of it."""
        for token_id in token_ids:
            self._has_ids = True
            if (name := self._names.get(token_id)) is not None:
                self._come[name] += 1
        self._held += text
        return self._release(len(self._held) - self._num_held())

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return self._release(len(self._held))

    def _num_held(self) -> int:
        """The length of the longest end of the text that may become a special token."""
        held, beginnings = self._held, self._specials.beginnings
        longest = min(len(held), self._specials.longest - 1)
        return next((size for size in range(longest, 0, -1) if held[-size:] in beginnings), 0)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return self._specials.pattern.sub(self._substitute, text)

    def _substitute(self, match: re.Match[str]) -> str:
        text = match.group()
        if self._has_ids and not self._come[text]:
            return text[0] + _GUARD + text[1:]
        self._come[text] -= 1
        return "" if self._drops and text not in self._specials.kept else text
