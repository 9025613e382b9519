"""From logit_bias, allowed_token_ids and bad_words to token ids, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import RequestError, shown
from nanoinfer.sampling.limits import MAX_BAD_TOKENS, TokenLimits


def token_limits(
    bias: tuple[tuple[int, float], ...],
    allowed: tuple[int, ...] | None,
    bad_words: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> TokenLimits:
    """Return what a request asks of the choice of tokens.

    Args:
        bias, allowed, bad_words: fields of SamplingParams.

    Raises:
        RequestError: a token is outside the vocabulary, there is no tokenizer for the bad words or it cannot read
            them, or they have too many tokens.
    """
    _check_vocabulary("logit_bias", (token_id for token_id, _ in bias), vocab_size)
    _check_vocabulary("allowed_token_ids", allowed or (), vocab_size)
    spelt = spellings(tokenizer, bad_words) if bad_words else []
    # A word with a token that the model does not have cannot come.
    words = tuple(word for word in dict.fromkeys(spelt) if max(word) < vocab_size)
    if (num_tokens := sum(len(word) for word in words if len(word) > 1)) > MAX_BAD_TOKENS:
        raise RequestError(
            f"bad_words that have several tokens have {num_tokens} in all, {MAX_BAD_TOKENS} are possible: give fewer "
            "or shorter ones",
            field="bad_words",
        )
    return TokenLimits(bias=bias, allowed=allowed, words=words)


@lru_cache(maxsize=64)  # so that rows with equal limits have one line
def suppressing(limits: TokenLimits, token_ids: tuple[int, ...]) -> TokenLimits:
    """Return the limits with tokens that never come, whatever a request asks for."""
    return replace(limits, words=(*limits.words, *((one,) for one in token_ids)))


def spellings(tokenizer: PreTrainedTokenizerBase | None, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the tokens of each word, and those that it has after a space where these are other ones.

    As in vLLM the latter count only if there are as many of them and the first differs: then the space is part of the
    word's first token. Otherwise the word comes as the former behind a token of its own, the space.

    Raises:
        RequestError: there is no tokenizer, or it cannot read a word.
    """
    if tokenizer is None:
        message = f"bad_words={shown(list(words))} is text, but there is no tokenizer: give logit_bias={{id: -100}}"
        raise RequestError(message, field="bad_words")
    found = []
    for word in words:
        try:
            alone, spaced = (
                tuple(tokenizer.encode(before + word.lstrip(), add_special_tokens=False)) for before in ("", " ")
            )
        except Exception as error:  # the tokenizer's library may raise anything
            raise RequestError(
                f"the tokenizer cannot read the bad word {shown(word)}: {error}", field="bad_words"
            ) from error
        if not alone:
            message = f"bad_words holds {shown(word)}, of which the tokenizer makes no token: leave it out"
            raise RequestError(message, field="bad_words")
        found.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return found


def check_some_left(limits: TokenLimits, banned: Collection[int], vocab_size: int) -> None:
    """Raise RequestError if the request can generate nothing at its beginning.

    banned: tokens that `min_tokens` bans.
    """
    never = limits.banned.union(banned)
    allowed = range(vocab_size) if limits.allowed is None else limits.allowed
    if all(token_id in never for token_id in allowed):
        raise RequestError(
            "allowed_token_ids, bad_words, min_tokens and the checkpoint's suppress_tokens leave no token to begin "
            "with: allow more tokens, or give min_tokens=0",
            field="bad_words" if limits.allowed is None else "allowed_token_ids",
        )


def check_can_come(
    token_ids: tuple[int, ...], limits: TokenLimits | None, banned: Collection[int], vocab_size: int, field: str
) -> None:
    """Raise RequestError if tokens that a request will need cannot come one after the other.

    Args:
        banned: tokens that `min_tokens` bans.
        field: the field that needs them.
    """
    limits, wanted = limits or TokenLimits(), set(token_ids)
    words = [
        word for word in limits.words if any(word == token_ids[at : at + len(word)] for at in range(len(token_ids)))
    ]
    faults = {
        "allowed_token_ids": limits.allowed is not None and not wanted <= set(limits.allowed),
        "bad_words": bool(words),
        "min_tokens": not wanted.isdisjoint(banned),
        "the model's vocabulary": max(token_ids) >= vocab_size,
    }
    if at_fault := [name for name, is_at_fault in faults.items() if is_at_fault]:
        raise RequestError(
            f"{field} needs the tokens {shown(list(token_ids))} to come, which {at_fault[0]} forbids: leave one of "
            "the two out",
            field=field,
        )


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = [token_id for token_id in token_ids if token_id >= vocab_size]
    if wrong:
        raise RequestError(
            f"{name} has {shown(wrong)} outside the vocabulary: token ids are whole numbers from 0 to {vocab_size - 1}",
            field=name,
        )
