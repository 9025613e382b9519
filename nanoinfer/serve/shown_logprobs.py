"""Log-probabilities as OpenAI's two APIs and vLLM show them.

Lists are iterators whose entries are made as they are written: there may be a million of them in one answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from nanoinfer.outputs import Logprob
from nanoinfer.requests.token_bytes import TokenBytes
from nanoinfer.serve.errors import ApiError

Entry = dict[int, Logprob]
_LOWEST_LOGPROB = -9999.0  # vLLM's; JSON has no -inf
_PART = "\ufffd"  # in the text of a token that is not of whole characters


class ShownLogprobs:
    """Shows log-probabilities of tokens.

    Args:
        token_bytes: what single tokens are made of.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def of_chat(self, token_ids: Sequence[int], entries: Sequence[Entry], top: int) -> Iterator[dict]:
        """Yield what a chat shows of each token, and of the `top` likeliest ones in its place."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            likeliest = [self._of_chat(*item) for item in islice(entry.items(), top)]
            yield self._of_chat(token_id, entry[token_id]) | {"top_logprobs": likeliest}

    def _of_chat(self, token_id: int, one: Logprob) -> dict:
        text, own = one.decoded_token, self._bytes[token_id]
        name = f"token_id:{token_id}" if text is None else text
        return {"token": name, "logprob": _finite(one), "bytes": list(name.encode() if own is None else own)}

    def names(self, token_ids: Sequence[int], entries: Sequence[Entry | None], first: str | None) -> Iterator[str]:
        """Yield what a completion calls each token.

        Args:
            first: the text of the first token of a prompt, which has no entry; None: there is no tokenizer.
        """
        for token_id, entry in zip(token_ids, entries, strict=True):
            yield self._name(token_id, first if entry is None else entry[token_id].decoded_token)

    def likeliest(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], top: int
    ) -> Iterator[dict[str, float] | None]:
        """Yield by their names the `top` likeliest tokens in the place of each, and that one."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            yield None if entry is None else self._by_name(token_id, likeliest(entry, token_id, top))

    def _by_name(self, token_id: int, entry: Entry) -> dict[str, float]:
        named = {self._name(one_id, one.decoded_token): _finite(one) for one_id, one in entry.items()}
        if len(named) == len(entry):
            return named
        names = {token_id: self._name(token_id, entry[token_id].decoded_token)}
        for one_id, one in entry.items():
            if one_id not in names:
                names[one_id] = self._free_name(one_id, one.decoded_token, set(names.values()))
        return {names[one_id]: _finite(one) for one_id, one in entry.items()}

    def _free_name(self, token_id: int, text: str | None, taken: set[str]) -> str:
        """Return a name that no other token of the same place has: several may have one text, with and without a
        blank that is dropped in front of it."""
        if (name := self._name(token_id, text)) not in taken:
            return name
        own = (self._bytes[token_id] or b"").decode(errors="replace")
        return own if own and own not in taken else f"token_id:{token_id}"

    def _name(self, token_id: int, text: str | None) -> str:
        """Return the token's text, the bytes of one that is not of whole characters as OpenAI names these, and without
        a tokenizer the name that vLLM has."""
        if text is None:
            return f"token_id:{token_id}"
        if _PART not in text or (own := self._bytes[token_id]) is None:
            return text
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def values(token_ids: Sequence[int], entries: Sequence[Entry | None]) -> Iterator[float | None]:
    """Yield the log-probability of each token; None of the first one of a prompt."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        yield None if entry is None else _finite(entry[token_id])


def of_prompt(token_ids: Sequence[int], entries: Sequence[Entry | None], top: int) -> Iterator[dict[int, dict] | None]:
    """Yield what vLLM shows of each token of a prompt, and of the `top` likeliest ones in its place."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        yield entry and {
            one_id: {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for one_id, one in likeliest(entry, token_id, top).items()
        }


def likeliest(entry: Entry, token_id: int, top: int) -> Entry:
    """Return of an entry, which may have more, a token and the `top` likeliest ones."""
    if len(entry) <= top:
        return entry
    return {one_id: one for one_id, one in entry.items() if one_id == token_id or one.rank <= top}


def _finite(one: Logprob) -> float:
    """Return a number that JSON has. NaN is none and stands for no other: an error of the request."""
    if math.isnan(one.logprob):
        raise ApiError("a log-probability is NaN: check the checkpoint's weights", code="engine_error")
    return max(_LOWEST_LOGPROB, one.logprob)
