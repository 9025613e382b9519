"""What a tokenizer's description says about long texts: how many tokens they have at least, and where to cut them.

Both are claimed only if they follow from the parts of the tokenizer. A tokenizer with a part that is unknown here has
no bound, or no cuts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoinfer.requests.prompts import encode, too_long

LONG_CHARS = 20_000  # about 20 ms of work; of a shorter text nothing need be known
PIECE_CHARS = 16_384  # 10 to 30 ms of work
_NOT_OVERRIDDEN = ("encode", "_encode_plus")  # if a subclass overrides these, the description is incomplete
_SEARCHED_CHARS = 65_536  # in one search, because a search holds Python's lock

# Characters that are letters in every version of Unicode and that NFC does not change.
_LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
# Neither letters nor marks that NFC would join with the letter before. No apostrophe: it begins English endings.
_OTHERS = ' \n\t0123456789_.,;:()<>={}*/+"#。，、；：！？'

# Alternatives of the patterns that GPT-2, Llama 3, Qwen, GPT-4o and similar tokenizers use to find words. None of them
# matches a letter followed by one of `_OTHERS`, and none looks back. If all letters, all spaces and all other
# characters are matched by some alternative, a word ends wherever a letter is followed by one of `_OTHERS`, whatever
# comes before or after.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTER_WORDS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?",
}
_OTHER_WORDS = {r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"}
_NUMBERS = {r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"}
_SPACES = {r"\s+"}
_FURTHER = {
    _ENDINGS,
    *"'s 't 're 've 'm 'll 'd".split(),
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?",
}


@dataclass(frozen=True)
class TextPieces:
    """What is known about one tokenizer.

    Attributes:
        token_chars: the most characters of a text that one token can stand for; None: not known.
        ascii_token_chars: the same for texts of ASCII characters only.
        cut: matches two characters between which a text may be cut: the tokens of both pieces together, without special
            tokens, are the tokens of the whole text. None: no such place is known.
        before, after: the special tokens around every text.
    """

    token_chars: int | None = None
    ascii_token_chars: int | None = None
    cut: re.Pattern[str] | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def num_tokens_at_least(self, text: str) -> int:
        longest = self.ascii_token_chars if text.isascii() else self.token_chars
        return 0 if longest is None else math.ceil(len(text) / longest)

    def end_of_piece(self, text: str, begin: int) -> int:
        """Return the first index after `PIECE_CHARS` characters where the text may be cut, or the end of the text."""
        at = begin + PIECE_CHARS
        while self.cut is not None and at < len(text):
            # Begin one character earlier, so that no pair is missed between two searches.
            if found := self.cut.search(text, at - 1, at + _SEARCHED_CHARS):
                return found.start() + 1
            at += _SEARCHED_CHARS
        return len(text)


def examine(tokenizer: PreTrainedTokenizerBase | None) -> TextPieces:
    """Find out what is known about a tokenizer. Takes about half a second for a large vocabulary."""
    own, fast = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(own, fast) or any(getattr(own, name) is not getattr(fast, name) for name in _NOT_OVERRIDDEN):
        return TextPieces()
    described = _Description(json.loads(tokenizer.backend_tokenizer.to_str()))
    added = [token["content"] for token in described.added_tokens]
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is not None:
        added += [normalizer.normalize_str(content) for content in added]
    bounds = described.token_chars(added)
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    places = [at for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare]
    if len(places) != 1:  # it is not clear which tokens are special
        return TextPieces(*bounds)
    return TextPieces(*bounds, described.cut(added), tuple(whole[: places[0]]), tuple(whole[places[0] + len(bare) :]))


def renders_first(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the chat template makes a text, which is then tokenised like any other text."""
    renders = getattr(type(tokenizer), "apply_chat_template", None)
    return renders is PreTrainedTokenizerBase.apply_chat_template


def encode_in_pieces(
    tokenizer: PreTrainedTokenizerBase, known: TextPieces, text: str, max_model_len: int, *, is_bare: bool = False
) -> list[int]:
    """Return the token ids of a text, with special tokens around them unless it `is_bare`.

    Raises:
        RequestError: as `encode`; or it has `max_model_len` tokens or more, of which no more are made than show that.
    """
    if (num_tokens := known.num_tokens_at_least(text)) >= max_model_len:
        raise too_long(f"{len(text)} characters, which are at least {num_tokens} tokens", num_tokens, max_model_len)
    bare = dict(add_special_tokens=False)
    if known.cut is None:
        return encode(tokenizer, text, **(bare if is_bare else {}))
    token_ids, begin = [] if is_bare else list(known.before), 0
    while begin < len(text):
        end = known.end_of_piece(text, begin)
        token_ids += encode(tokenizer, text[begin:end], **bare)
        if len(token_ids) >= max_model_len and end < len(text):
            raise too_long(f"at least {len(token_ids)} tokens", len(token_ids), max_model_len)
        begin = end
    return token_ids if is_bare else [*token_ids, *known.after]


class _Description:
    """The content of a tokenizer.json."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.added_tokens: list[dict] = parts["added_tokens"]
        self._model: dict[str, Any] = parts["model"]
        self._normalizers = list(_flat(parts["normalizer"], "normalizers"))
        self._words = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
        self._processors = list(_flat(parts["post_processor"], "processors"))

    def token_chars(self, added: list[str]) -> tuple[int | None, int | None]:
        """Return the most characters of a text, and of an ASCII text, that a token can stand for; None: no limit."""
        takes_space = any(token["lstrip"] or token["rstrip"] for token in self.added_tokens)
        keeps_all = all(map(_keeps_length, self._normalizers)) and all(map(_keeps_text, self._words))
        if takes_space or not keeps_all or self._model["type"] != "BPE" or not self._every_character_counts():
            return None, None
        longest = max(map(len, (*self._model["vocab"], *added)))
        # NFC joins into one character at most the 4 characters of its decomposition; the compatibility forms add none.
        return longest * 4 ** sum(part["type"] in ("NFC", "NFKC") for part in self._normalizers), longest

    def _every_character_counts(self) -> bool:
        """Whether every character gets a token: none unknown is dropped or fused with its neighbours."""
        vocab, model = self._model["vocab"], self._model
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return False
        if model.get("unk_token") is not None and not model.get("fuse_unk"):
            return True
        if any(part["type"] == "ByteLevel" for part in (*self._words, *self._normalizers)):
            return all(byte in vocab for byte in pre_tokenizers.ByteLevel.alphabet())
        return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))

    def cut(self, added: list[str]) -> re.Pattern[str] | None:
        """Return the pattern of places where a text may be cut, as in `TextPieces`."""
        takes_neighbours = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in self.added_tokens)
        if takes_neighbours or self._model["type"] != "BPE" or self._model.get("dropout"):
            return None
        if not {part["type"] for part in self._processors} <= {"ByteLevel", "TemplateProcessing"}:
            return None
        letters, others = self._between_words() or self._never_merged() or ("", "")
        for content in added:  # added tokens are found first, so they must never be cut
            others = others.translate(dict.fromkeys(map(ord, re.findall(f"(?<=[{_LETTERS}]).", content))))
        return re.compile(f"[{letters}][{others}]") if letters and others else None

    def _between_words(self) -> tuple[str, str] | None:
        """For tokenizers that split words first: return letters, and characters that always end a word after them."""
        if not self._words or any(part["type"] != "NFC" for part in self._normalizers):
            return None
        first, *rest = self._words
        if any(part["type"] not in ("ByteLevel", "Split", "Digits", "Punctuation") for part in rest):
            return None
        if first["type"] == "ByteLevel" and first.get("use_regex", True):
            # With add_prefix_space, a space is put before a text that does not begin with one.
            return _LETTERS, " " if first.get("add_prefix_space") else _OTHERS
        return (_LETTERS, _OTHERS) if _is_known_split(first) else None

    def _never_merged(self) -> tuple[str, str] | None:
        """For tokenizers that write a space as "▁" and merge across words: letters that no token has before "▁"."""
        model, vocab = self._model, self._model["vocab"]
        if self._normalizers == [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]:
            is_known = all(
                part["type"] == "Split" and part["pattern"] == {"String": " "} and part["behavior"] != "Removed"
                for part in self._words
            )
        else:
            is_known = not self._normalizers and len(self._words) == 1
            is_known = is_known and self._words[0]["type"] == "Metaspace" and self._words[0]["replacement"] == "▁"
        if not is_known:
            return None
        if model.get("ignore_merges") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        letters = {letter for letter in vocab if len(letter) == 1 and re.match(f"[{_LETTERS}]", letter)}
        for token in vocab:
            letters.difference_update(re.findall("(.)(?=▁)", token))
        if not letters or "▁" not in vocab:
            return None
        return "".join(sorted(letters)), " "


def _flat(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a nested "Sequence" in order; any other part is yielded itself."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[name]:
            yield from _flat(one, name)
    else:
        yield part


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Whether the normalizer drops no character of a text, apart from those that NFC joins."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and 0 < len(pattern) <= len(normalizer["content"])
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "ByteLevel")


def _keeps_text(words: dict[str, Any]) -> bool:
    if words["type"] in ("Split", "Punctuation"):
        return words["behavior"] != "Removed"
    return words["type"] in ("ByteLevel", "Digits", "Metaspace")


def _is_known_split(words: dict[str, Any]) -> bool:
    """Whether words are found by known alternatives, which "|" joins."""
    if words["type"] != "Split" or words["behavior"] != "Isolated" or words["invert"]:
        return False
    # Bars in groups of one level are left whole. A part that was cut wrongly is unknown.
    given = set(re.split(r"\|(?![^(\[]*[)\]])", words["pattern"].get("Regex", "")))
    groups = (_LETTER_WORDS, _OTHER_WORDS, _NUMBERS, _SPACES)
    return all(given & group for group in groups) and given <= set().union(*groups, _FURTHER)
