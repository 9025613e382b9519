"""What the metadata of a file says of its tokens, checked: the file may be anybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from nanoinfer.common.errors import shown
from nanoinfer.gguf.pre import DEFAULT, PRE, Pre

_PREFIX = "tokenizer.ggml."
_NO_TOKENIZER = ("none", "no_vocab")
BYTE_PAIRS, SENTENCEPIECE, CHARACTER_PAIRS = "gpt2", "llama", "gemma4"
# All pairs of parts of a token are tried, which takes the square of its length. Known vocabularies have 3 million
# characters, and tokens of at most 512.
_MAX_CHARACTERS, _MAX_TOKEN_CHARACTERS = 2**25, 2**11
_KEYS = {name: f"{name}_token_id" for name in "bos eos eot eom fim_pad fim_rep fim_sep".split()}
_KEYS |= {"unk": "unknown_token_id", "pad": "padding_token_id"}
# SentencePiece's own, where a file of that kind does not say.
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}


class TokenType(IntEnum):
    """The types of tokens in a file. A token of type ADDED is text that is looked for before all else."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    SPECIAL = 3
    ADDED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        model: BYTE_PAIRS, SENTENCEPIECE, or CHARACTER_PAIRS: SentencePiece's tokens with merges in place of scores.
        tokens: the texts, all different; those of byte pairs are in GPT-2's letters for bytes.
        types: of each token.
        scores: of each token, float32; a higher one is merged earlier. Empty for byte pairs.
        merges: of pairs, "left right", the first is merged earliest.
        pre: how text is cut into words before byte pairs are merged.
        named: ids by what they are for: "bos", "eos", "eot", "eom", "unk", "pad", "fim_pad", "fim_rep", "fim_sep".
        adds_space: a text begins with a space.
        strips_after_special: white space after a special token is no text, as in Phi 3.
    """

    model: str
    tokens: list[str]
    types: Sequence[int]
    scores: np.ndarray
    merges: list[str]
    pre: Pre
    named: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    strips_after_special: bool

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens)}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Vocabulary | None:
        """Return the vocabulary of a file; None if it has none.

        Raises:
            ValueError: a kind of tokenizer that is unknown here, or what the file says of its tokens is not so.
        """
        model = metadata.get(_PREFIX + "model", "none")
        if isinstance(model, str) and model in _NO_TOKENIZER:
            return None
        if not isinstance(model, str) or model not in (BYTE_PAIRS, SENTENCEPIECE, CHARACTER_PAIRS):
            raise ValueError(
                f"{_PREFIX}model is {shown(model)}: only {BYTE_PAIRS!r} (byte pairs), {SENTENCEPIECE!r} "
                f"(SentencePiece) and {CHARACTER_PAIRS!r} are supported; set skip_tokenizer_init=True to work on token "
                "ids"
            )
        name = metadata.get(_PREFIX + "pre", DEFAULT) if model == BYTE_PAIRS else DEFAULT
        if not isinstance(name, str) or name not in PRE:
            raise ValueError(
                f"{_PREFIX}pre is {shown(name)}: supported are {', '.join(PRE)}; set skip_tokenizer_init=True to work "
                "on token ids"
            )
        tokens = _tokens(metadata)
        named = named_ids(metadata, len(tokens))
        bos, eos = _flag(metadata, "add_bos_token"), _flag(metadata, "add_eos_token")
        for flag, what in ((bos, "bos"), (eos, "eos")):
            if flag and what not in named:
                raise ValueError(f"{_PREFIX}add_{what}_token is true, but the file has no {_PREFIX}{_KEYS[what]}")
        title, has_begin = metadata.get("general.name"), model != BYTE_PAIRS or PRE[name].adds_bos
        return cls(
            model=model,
            tokens=tokens,
            types=_types(metadata, len(tokens)),
            scores=_scores(metadata, len(tokens)) if model == SENTENCEPIECE else np.zeros(0, np.float32),
            merges=[] if model == SENTENCEPIECE else _texts(metadata, "merges"),
            pre=PRE[name],
            named=named,
            adds_bos="bos" in named and (has_begin if bos is None or model == CHARACTER_PAIRS else bos),
            adds_eos=bool(eos),
            adds_space=model == SENTENCEPIECE and _flag(metadata, "add_space_prefix") is not False,
            strips_after_special=isinstance(title, str) and any(name in title.lower() for name in ("phi-3", "phi3")),
        )


def named_ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return the ids of a file with so many tokens by what they are for, as in `Vocabulary.named`; ValueError."""
    is_known = str(metadata.get(_PREFIX + "model")) == SENTENCEPIECE
    ids = {name: at for name, at in _SENTENCEPIECE_IDS.items() if is_known and at < count}
    for name, key in _KEYS.items():
        if (value := metadata.get(_PREFIX + key)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < count:
            raise ValueError(f"{_PREFIX}{key} is {shown(value)}: the file has tokens 0 to {count - 1:,}")
        ids[name] = int(value)
    return ids


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens. A token without text is one that no text becomes."""
    tokens = [token or f"[EMPTY_{at}]" for at, token in enumerate(_texts(metadata, "tokens"))]
    lengths = [len(token) for token in tokens]
    longest = max(lengths, default=0)
    if not tokens or longest > _MAX_TOKEN_CHARACTERS or sum(lengths) > _MAX_CHARACTERS:
        raise ValueError(
            f"{_PREFIX}tokens has {len(tokens):,} tokens with {sum(lengths):,} characters, {longest:,} in the longest: "
            f"there must be a token, at most {_MAX_CHARACTERS:,} characters, and {_MAX_TOKEN_CHARACTERS:,} in a token"
        )
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"{_PREFIX}tokens has {shown(twice)} twice: the file is damaged")
    return tokens


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    texts = metadata.get(_PREFIX + name)
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{_PREFIX}{name} is {shown(texts)}: a list of texts in UTF-8 is needed")
    return list(texts)


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    if _PREFIX + "token_type" not in metadata:
        return [TokenType.NORMAL] * count
    types = _numbers(metadata, "token_type", count, "iu")
    if len(types) and not 0 <= types.min() <= types.max() <= max(TokenType):
        raise ValueError(
            f"{_PREFIX}token_type has {types.min()} to {types.max()}: types are 0 to {int(max(TokenType))}"
        )
    return types.tolist()


def _scores(metadata: Mapping[str, Any], count: int) -> np.ndarray:
    if _PREFIX + "scores" not in metadata:
        return np.zeros(count, np.float32)
    scores = _numbers(metadata, "scores", count, "fiu").astype(np.float32)
    if np.isnan(scores).any():
        raise ValueError(f"{_PREFIX}scores has values that are no numbers: the file is damaged")
    return scores


def _numbers(metadata: Mapping[str, Any], name: str, count: int, kinds: str) -> np.ndarray:
    values = metadata[_PREFIX + name]
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError):
        numbers = np.zeros(0)
    if numbers.ndim != 1 or len(numbers) != count or numbers.dtype.kind not in kinds:
        raise ValueError(f"{_PREFIX}{name} is {shown(values)}: a number for each of {count:,} tokens is needed")
    return numbers


def _flag(metadata: Mapping[str, Any], name: str) -> bool | None:
    value = metadata.get(_PREFIX + name)
    if value is not None and not isinstance(value, bool | np.bool_):
        raise ValueError(f"{_PREFIX}{name} is {shown(value)}: true or false is needed")
    return None if value is None else bool(value)
