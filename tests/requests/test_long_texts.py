"""Long texts have the tokens that the tokenizer itself gives them, and no more of them are read than is needed."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from trained_tokenizers import PATTERNS, make_tokenizer
from transformers import PreTrainedTokenizerFast

from nanoinfer.common.errors import RequestError
from nanoinfer.requests import prompts
from nanoinfer.requests.prompts import encode, encode_within

KINDS = [*PATTERNS, "gpt-2", "gpt-2 with a space in front", "gemma", "mistral", "whole words"]
ATOMS = [
    *" \n\t\r0123a.b,c;:()xyzABC'_-=\"#/", "  ", "\n\n", " \n", "'s", "'S", "'ll", " the", "the", "é", "e\u0301",
    "\u0338", "\u0301", "漢字", "。", "、", "ひ", "か\u3099", "가", "\u11a8", "한", "я", "İ", "ſ", "\u00a0", "\u2003",
    "😀", "<|im_start|>", "<s>", "</s>", "<mask>", "\u200d", "ǆ", "٣", "²", "\x00", "\x85", "\u0345",
    "ϓ\u0301", "def f(self):\n    return", "\u1f82", "\u0930\u093c", "▁", "\u1100", "\u1161", " it's", " we'll",
]  # fmt: skip
PROSE = "The cache holds blocks of tokens. "


def make(kind: str) -> PreTrainedTokenizerFast:
    if kind == "whole words":
        words = Tokenizer(models.WordLevel({"the": 0, "a": 1, "unknown": 2}, "unknown"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer = make_tokenizer(kind)
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True)})
    return tokenizer


def drawn(choose: random.Random) -> str:
    return "".join(choose.choice(ATOMS) for _ in range(choose.randint(1, 60)))


@pytest.fixture
def all_are_long(monkeypatch):
    monkeypatch.setattr(prompts, "LONG_CHARS", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_tokens_that_the_tokenizer_gives_it(kind, all_are_long):
    tokenizer, choose = make(kind), random.Random(0)
    for _ in range(200):
        text = drawn(choose)
        for how in ({}, dict(add_special_tokens=False), dict(add_special_tokens=True)):
            assert encode(tokenizer, text, **how) == tokenizer.encode(text, **how), text


def test_what_a_user_asks_of_the_tokenizer_changes_no_later_text(all_are_long):
    tokenizer = make_tokenizer("llama 3")
    tokenizer.add_special_tokens({"pad_token": "</s>"})
    wanted = tokenizer.encode(PROSE)
    for how in (
        dict(truncation=True, max_length=4),
        dict(padding="max_length", max_length=99),
        dict(split_special_tokens=True),
    ):
        assert tokenizer.encode("<s>" + PROSE, **how) != [1, *wanted]
        assert encode(tokenizer, PROSE) == wanted and encode(tokenizer, "<s>", add_special_tokens=False) == [1]
    tokenizer.split_special_tokens = True
    assert (
        encode(tokenizer, "<s>", add_special_tokens=False) == tokenizer.encode("<s>", add_special_tokens=False) != [1]
    )


def test_a_tokenizer_that_is_a_program_is_asked_itself(all_are_long):
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *arguments, **options):
            return super()._encode_plus(text.upper(), *arguments, **options)

    own = Own(tokenizer_object=make_tokenizer("llama 3").backend_tokenizer)
    assert encode(own, PROSE) == own.encode(PROSE) != make_tokenizer("llama 3").encode(PROSE)


@pytest.fixture
def read(monkeypatch):
    """The lengths of the texts that were encoded."""
    lengths, inner = [], prompts.encode

    def recorded(tokenizer, text, **how):
        lengths.append(len(text))
        return inner(tokenizer, text, **how)

    monkeypatch.setattr(prompts, "encode", recorded)
    return lengths


@pytest.mark.parametrize("kind", ["llama 3", "mistral", "whole words"])
def test_a_text_that_is_far_too_long_is_not_read_to_its_end(kind, read):
    tokenizer = make(kind)
    with pytest.raises(
        RequestError, match=r"at least \d+ tokens in 20000 of its 340000 .*, and max_model_len=64"
    ) as told:
        encode_within(tokenizer, PROSE * 10_000, 64)
    assert read == [20_000] and told.value.is_too_long and told.value.lengths[0] > 64
    with pytest.raises(RequestError, match="tokens in 24000 of its"):
        encode_within(tokenizer, PROSE * 10_000, 3000)


def test_a_text_of_few_long_tokens_is_read_to_its_end_in_steps(read):
    tokenizer = make("whole words")
    text = "w" * 90_000 + " the" * 20
    assert encode_within(tokenizer, text, 22) == [2, *[0] * 20] and read == [20_000, 40_000, 80_000, len(text)]


@pytest.mark.parametrize("kind", ["llama 3", "gemma"])
def test_a_text_at_the_limit_is_taken(kind, read):
    tokenizer = make(kind)
    for text in (PROSE * 10, PROSE * 3000):
        wanted = tokenizer.encode(text)
        assert encode_within(tokenizer, text, len(wanted) + 1) == wanted
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert encode_within(tokenizer, text, len(wanted) + 1, is_bare=True) == bare
