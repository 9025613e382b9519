"""Texts that look like special tokens, spelled as the text that they are."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanoinfer.requests.prompts import encode

# Stands within each such text while a template is rendered. It is a word of letters and digits, as templates may write
# texts as JSON, and random, so that nobody can send it.
_GUARD = f"qz{secrets.token_hex(8)}zq"
_BEFORE = "\n"


class Speller:
    """Keeps special tokens out of what clients say.

    Args:
        special: the texts of all special tokens.
    """

    def __init__(self, special: Iterable[str]) -> None:
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return checked messages in which nothing is a special token; arguments of calls become objects."""
        found = []
        for given in messages:
            message = dict(given)
            if isinstance(calls := message.get("tool_calls"), list | tuple):
                message["tool_calls"] = [_with_objects(call) for call in calls]
            found.append(self.guarded(message))
        return found

    def guarded(self, value: Any) -> Any:
        """Return a value of JSON in whose texts nothing is a special token."""
        if isinstance(value, str):
            while self._pattern.search(value):
                value = self._pattern.sub(lambda found: f"{found[0][0]}{_GUARD}{found[0][1:]}", value)
            return value
        if isinstance(value, Mapping):
            return {self.guarded(name): self.guarded(one) for name, one in value.items()}
        return [self.guarded(one) for one in value] if isinstance(value, list | tuple) else value


def _with_objects(call: Any) -> Any:
    """Return a call whose arguments are no longer text, in which a special token could be written with escapes."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def is_spelled(text: str) -> bool:
    """Whether a rendered text has something that must be spelled: `spell` says its tokens."""
    return _GUARD in text


def spell(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a rendered text. Raises as `encode`."""
    first, *others = text.split(_GUARD)
    found = encode(tokenizer, first, add_special_tokens=False)
    before = encode(tokenizer, _BEFORE, add_special_tokens=False)
    for piece in others:
        # Some tokenizers put a blank before each text: not where another text is before it.
        behind = encode(tokenizer, _BEFORE + piece, add_special_tokens=False)
        if behind[: len(before)] == before:
            found += behind[len(before) :]
        else:
            found += encode(tokenizer, piece, add_special_tokens=False)
    return found
