"""The tokenizer of a file, built from its metadata as one of the `tokenizers` library.

transformers can read the metadata too, but not so that the tokens are the same: it makes SentencePiece's vocabularies
Unigram and cuts words by the architecture's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import shown
from nanoinfer.gguf.end_tokens import special_by_text
from nanoinfer.gguf.sentencepiece import merges_of
from nanoinfer.gguf.vocabulary import BYTE_PAIRS, SENTENCEPIECE, TokenType, Vocabulary

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL, _ADDED = (TokenType.SPECIAL, TokenType.UNKNOWN), (TokenType.SPECIAL, TokenType.UNKNOWN, TokenType.ADDED)
# SentencePiece's sign for a space.
_SPACE = "▁"
# Phi 3 keeps white space after these of its special tokens.
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a file, with its chat template; None if the file has none.

    Args:
        metadata: of the file; arrays of texts are lists, arrays of numbers lists or numpy arrays.

    Raises:
        ValueError: a kind of tokenizer that is unknown here, or what the file says of its tokens is not so.
    """
    vocabulary = Vocabulary.of(metadata)
    if vocabulary is None:
        return None
    template = _chat_template(metadata)
    tokenizer = _byte_pairs(vocabulary) if vocabulary.model == BYTE_PAIRS else _sentencepiece(vocabulary)
    tokenizer.add_tokens(_added_tokens(vocabulary))
    named = {name: vocabulary.tokens[vocabulary.named[name]] for name in ("bos", "eos") if name in vocabulary.named}
    # A padding token that is ordinary text must stay text.
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    others = {name: vocabulary.tokens[at] for name, at in vocabulary.named.items() if name in ("unk", "pad")}
    named |= {name: token for name, token in others.items() if token in special}
    # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_NotCopied(tokenizer),
        clean_up_tokenization_spaces=False,
        chat_template=template,
        **{f"{name}_token": token for name, token in named.items() if token in special},
    )
    for name, token in named.items():  # after the start, in which transformers would make them special
        if token not in special:
            setattr(wrapped, f"{name}_token", token)
    wrapped.add_bos_token, wrapped.add_eos_token = vocabulary.adds_bos, vocabulary.adds_eos
    return wrapped


class _NotCopied:
    """Hands a tokenizer to transformers, whose copy of it goes through JSON and takes seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._tokenizer


def _byte_pairs(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _tokenizer(vocabulary, _merges(vocabulary), ignore_merges=vocabulary.pre.ignores_merges)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    tokenizer.decoder = decoders.Sequence([*_letters_kept(vocabulary), decoders.ByteLevel()])
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    # The first of two that are the same counts.
    merges = list(dict.fromkeys(tuple(merge.split(" ", 1)) for merge in vocabulary.merges))
    for merge in merges:
        if len(merge) != 2:
            raise ValueError(f"tokenizer.ggml.merges has {shown(merge[0])}: two tokens with a space between are needed")
    return merges


def _letters_kept(vocabulary: Vocabulary) -> list[decoders.Decoder]:
    """Return what keeps the text of added tokens that would be taken for letters of bytes, such as "ö" for byte 246."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    types = zip(vocabulary.tokens, vocabulary.types, strict=True)
    taken = [token for token, kind in types if kind in _ADDED and not token.isascii() and letters >= set(token)]
    spelt = {token: as_bytes.pre_tokenize_str(token)[0][0] for token in taken}
    return [decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), spelling) for token, spelling in spelt.items()]


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    unknown = vocabulary.named.get("unk")
    unknown_token = None if unknown is None else vocabulary.tokens[unknown]
    merges = merges_of(vocabulary) if vocabulary.model == SENTENCEPIECE else _merges(vocabulary)
    tokenizer = _tokenizer(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_token)
    spaces = normalizers.Replace(" ", _SPACE)
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space:
        # To each text between added tokens.
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        to_text.append(decoders.Strip(" ", 1, 0))
    if vocabulary.model != SENTENCEPIECE:  # no merge goes beyond a line
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(to_text)
    return tokenizer


def _tokenizer(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the library's own, for merges of what is no token
        raise ValueError(f"tokenizer.ggml.merges does not fit the tokens: {error}") from error


def _added_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are looked for in a text before all else."""
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = {token for token, kind in types.items() if kind in _SPECIAL} | set(special_by_text(types))
    added = [token for token, kind in types.items() if kind in _ADDED or token in special]
    strips = {token for token in added if token not in _NOT_STRIPPED} if vocabulary.strips_after_special else ()
    return [AddedToken(text, special=text in special, normalized=False, rstrip=text in strips) for text in added]


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the template, or all by name if the file has named ones too."""
    named = {key.removeprefix(_TEMPLATE + "."): key for key in metadata if key.startswith(_TEMPLATE + ".")}
    templates = {name: metadata[key] for name, key in ({"default": _TEMPLATE} | named).items() if key in metadata}
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ValueError(f"the chat template {name!r} is {shown(template)}: a text is needed")
    return templates if named else templates.get("default")
