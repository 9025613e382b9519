"""What a tokenizer's description promises of long texts holds: least numbers of tokens, and places to cut."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from trained_tokenizers import PATTERNS, by_words, make_tokenizer
from transformers import PreTrainedTokenizerFast

from nanoinfer.requests import text_pieces

KINDS = [*PATTERNS, "gpt-2", "gpt-2 with a space in front", "gemma", "mistral"]
ATOMS = [
    *" \n\t\r0123a.b,c;:()xyzABC'_-=\"#/", "  ", "\n\n", " \n", "'s", "'S", "'ll", " the", "the", "é", "e\u0301",
    "\u0338", "\u0301", "漢字", "。", "、", "ひ", "か\u3099", "가", "\u11a8", "한", "я", "İ", "ſ", "\u00a0", "\u2003",
    "😀", "<|im_start|>", "<s>", "</s>", "<|end of text|>", "\u200d", "ǆ", "٣", "²", "\x00", "\x85", "\u0345",
    "ϓ\u0301", "def f(self):\n    return", "\u1f82", "\u0930\u093c", "▁", "\u1100", "\u1161", " it's",
    " it's", " what's", " we'll",
]  # fmt: skip


def in_pieces(tokenizer, known, text: str) -> tuple[list[int], int]:
    """The tokens of the pieces, and how many pieces there are."""
    tokens, at, num_pieces = list(known.before), 0, 0
    while at < len(text):
        end = known.end_of_piece(text, at)
        tokens += tokenizer.encode(text[at:end], add_special_tokens=False)
        at, num_pieces = end, num_pieces + 1
    return [*tokens, *known.after], num_pieces


@pytest.mark.parametrize("special", ["plain", "with a space"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_and_no_text_fewer_than_promised(kind, special, monkeypatch):
    names = ("<|im_start|>", "<s>", "</s>") + (("<|end of text|>",) if special == "with a space" else ())
    tokenizer = make_tokenizer(kind, special=names)
    known = text_pieces.examine(tokenizer)
    if special == "with a space" and not known.cut:
        assert kind in ("gpt-2 with a space in front", "gemma", "mistral"), "only spaces could be cut before"
        return
    assert known.cut and known.token_chars
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", 5)
    monkeypatch.setattr(text_pieces, "_SEARCHED_CHARS", 3)
    choose, num_cuts = random.Random(0), 0
    for _ in range(500):
        text = "".join(choose.choice(ATOMS) for _ in range(choose.randint(1, 60)))
        whole = tokenizer.encode(text)
        pieces, num_pieces = in_pieces(tokenizer, known, text)
        assert pieces == whole, text
        assert len(whole) >= known.num_tokens_at_least(text), text
        num_cuts += num_pieces - 1
    assert num_cuts > 300


def test_the_least_number_of_tokens_is_near():
    known = text_pieces.examine(make_tokenizer("llama 3"))
    longest = max(map(len, make_tokenizer("llama 3").get_vocab()))
    assert known.num_tokens_at_least("a" * 1000) == -(-1000 // longest) and known.num_tokens_at_least("") == 0
    composed = text_pieces.examine(make_tokenizer("qwen"))
    assert composed.token_chars == 4 * composed.ascii_token_chars
    tokens = make_tokenizer("qwen").encode("\u03b1\u0313\u0300\u0345" * 100)
    assert composed.num_tokens_at_least("\u03b1\u0313\u0300\u0345" * 100) <= len(tokens), "4 characters become one"


def test_a_text_without_a_cut_is_one_piece():
    known = text_pieces.examine(make_tokenizer("llama 3"))
    text = "a" * 500_000
    assert known.end_of_piece(text, 0) == len(text)
    assert known.end_of_piece(text + " b", 0) == len(text)
    assert known.end_of_piece("word " * 50_000, 0) < text_pieces.PIECE_CHARS + 5
    assert text_pieces.TextPieces().end_of_piece("word " * 50_000, 0) == 250_000


def changed(change, kind="llama 3"):
    def make():
        tokenizer = make_tokenizer(kind).backend_tokenizer
        change(tokenizer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return make


def by_list():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "u": 1}, "u")))


def add(**options):
    return lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<mask>", **options)])


def assign(name, value):
    return lambda tokenizer: setattr(tokenizer, name, value)


def set_model(name, value):
    return lambda tokenizer: setattr(tokenizer.model, name, value)


UNKNOWN_WORDS = by_words(r"\p{L}+ ?|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
REMOVED = pre_tokenizers.Split(" ", "removed")
NO_CUT = {
    "a token takes space on its left": changed(add(lstrip=True)),
    "a token takes space on its right": changed(add(rstrip=True)),
    "a token wants to stand alone": changed(add(single_word=True)),
    "words of an unknown pattern": changed(assign("pre_tokenizer", UNKNOWN_WORDS)),
    "words of a pattern that looks back": changed(assign("pre_tokenizer", by_words(r"(?<=a)b|" + PATTERNS["llama 3"]))),
    "words split otherwise": changed(
        assign("pre_tokenizer", pre_tokenizers.Split(Regex(PATTERNS["llama 3"]), "merged_with_next"))
    ),
    "no words": changed(assign("pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False))),
    "a space in front of what is merged": changed(
        assign("normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])), "gemma"
    ),
    "words merged at random": changed(set_model("dropout", 0.1)),
    "whole words that are tokens": changed(set_model("ignore_merges", True), "gemma"),
    "lower case": changed(assign("normalizer", normalizers.Lowercase())),
    "another model": by_list,
}  # fmt: skip


@pytest.mark.parametrize("case", NO_CUT)
def test_no_cut_is_claimed_where_it_is_not_proved(case):
    assert text_pieces.examine(NO_CUT[case]()).cut is None


NO_BOUND = {
    "space removed": changed(assign("pre_tokenizer", REMOVED)),
    "characters removed": changed(assign("normalizer", normalizers.Replace("a", ""))),
    "a pattern replaced": changed(assign("normalizer", normalizers.Replace(Regex("a+"), "b"))),
    "accents stripped": changed(assign("normalizer", normalizers.StripAccents())),
    "space stripped": changed(assign("normalizer", normalizers.Strip())),
    "a token takes space": changed(add(lstrip=True)),
    "unknown characters fused": changed(set_model("byte_fallback", False), "gemma"),
    "unknown words": by_list,
}


@pytest.mark.parametrize("case", NO_BOUND)
def test_no_bound_is_claimed_where_a_token_may_stand_for_any_text(case):
    known = text_pieces.examine(NO_BOUND[case]())
    assert known.token_chars is None and known.num_tokens_at_least("a" * 10**6) == 0


def test_a_letter_that_merges_with_a_space_behind_it_is_not_cut_from_it():
    tokenizer = make_tokenizer("gemma", merged_spaces=True)
    merged = {token[token.index("▁") - 1] for token in tokenizer.get_vocab() if "▁" in token[1:] and token[0] != "▁"}
    known = text_pieces.examine(tokenizer)
    letters = [letter for letter in merged if letter.isascii() and letter.isalpha()]
    assert letters, "the tokenizer shows nothing"
    assert known.cut is None or not any(known.cut.search(f"{letter} ") for letter in letters)


def test_tokenizers_that_are_programs_are_not_examined():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments, **options):
            return super()._encode_plus(*arguments, **options)

    own = Own(tokenizer_object=make_tokenizer("llama 3").backend_tokenizer)
    assert text_pieces.examine(own) == text_pieces.examine(None) == text_pieces.TextPieces()
