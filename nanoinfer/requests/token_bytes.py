"""The bytes of single tokens: a character may span several, whose texts alone are U+FFFD."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's alphabet, with which byte-level tokenizers write bytes as characters.
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict):
    """The bytes of single tokens, by id; None where nothing but the decoded text is known of them.

    Those that were asked for are kept. Any thread may ask.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        parts = list(_flat(_decoder(tokenizer)))
        kinds = {part["type"] for part in parts}
        self._is_byte_level, self._has_byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
        known = self._is_byte_level or self._has_byte_tokens
        self._added = {one: str(token) for one, token in tokenizer.added_tokens_decoder.items()} if known else {}

    def __missing__(self, token_id: int) -> bytes | None:
        found = self[token_id] = self._bytes(token_id)
        return found

    def _bytes(self, token_id: int) -> bytes | None:
        if not (self._is_byte_level or self._has_byte_tokens):
            return None
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model has more tokens than the tokenizer
            return None
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if token_id in self._added:
            return self._added[token_id].encode()
        if not self._is_byte_level:
            return token.replace("▁", " ").encode()
        return bytes(_BYTE_OF[one] for one in token) if _BYTE_OF.keys() >= set(token) else None


def _decoder(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = None if decoder is None else decoder.__getstate__()
    return None if state is None else json.loads(state)


def _flat(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for one in part["decoders"]:
            yield from _flat(one)
    elif part is not None:
        yield part
