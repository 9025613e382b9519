"""Where in a prompt's text its tokens begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from nanoinfer.requests.detokenizer import Detokenizer


def text_offsets(tokenizer: PreTrainedTokenizerBase | None, text: str, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield how many characters of a prompt's text come before each token; 0 without a tokenizer.

    Special tokens that were put around a given text are none of it. A token that goes on with a character stands where
    that begins. Where a tokenizer writes a text in other letters, a token is taken to be as long as it is alone.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    at = num_released = 0
    for token_id in token_ids:
        yield min(at + detokenizer.num_chars - num_released, len(text))
        piece, _ = detokenizer.append([token_id])
        num_released += len(piece)
        at += _length(piece, text, at, is_added=token_id in added)


def _length(piece: str, text: str, at: int, *, is_added: bool) -> int:
    """Return how long a piece is in the text, which may lack special tokens, and a blank in front of a word."""
    if text.startswith(piece, at):
        return len(piece)
    if is_added:
        return 0
    bare = piece.removeprefix(" ")
    return len(bare) if text.startswith(bare, at) else len(piece)
