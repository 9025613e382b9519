"""Added tokens that are letters, which llguidance takes for bytes: "ü" is byte 252 in the alphabet of byte pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_letters(tokenizer: Any, added: Mapping[str, int], ends: Sequence[int]) -> Any:
    """Return llguidance's tokenizer in which added tokens have the bytes of their texts; the same where all have.

    added: the texts of tokens that were added to the vocabulary, with their ids; ends: ids of what ends a text.
    """
    wrong = {
        token_id: text.encode()
        for text, token_id in added.items()
        if len(text) == 1 and not text.isascii() and tokenizer.decode_bytes([token_id]) != text.encode()
    }
    if not wrong:
        return tokenizer
    from llguidance import LLTokenizer, TokenizerWrapper

    names = {token_id: text.encode() for text, token_id in added.items()}
    wrapped = TokenizerWrapper(_Tokens(tokenizer, names, wrong))
    return LLTokenizer(wrapped, n_vocab=tokenizer.vocab_size, eos_token=list(ends))


class _Tokens:
    """A tokenizer as llguidance asks for it: the bytes of each token, by its id."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, names: Mapping[int, bytes], letters: Mapping[int, bytes]) -> None:
        ids = range(tokenizer.vocab_size)
        special = [one for one in ids if tokenizer.is_special_token(one) and one not in letters]
        plain = {one: names.get(one, b"<no token %d>" % one) for one in special}
        self._tokenizer, self.eos_token_id, self.special_token_ids = tokenizer, tokenizer.eos_token, special
        self.tokens = [letters.get(one) or plain.get(one) or tokenizer.decode_bytes([one]) for one in ids]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)
