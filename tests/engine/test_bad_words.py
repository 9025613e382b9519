"""The tokens that a bad word has: alone, and behind a space where that is part of its first token, as in vLLM."""

import pytest
from trained_tokenizers import make_tokenizer

from nanoinfer.common.errors import RequestError
from nanoinfer.engine.token_limits import spellings, token_limits
from nanoinfer.sampling.limits import TokenLimits


class Written:
    """A tokenizer that knows a few texts."""

    def __init__(self, **known: list[int]) -> None:
        self.known = {text.replace("_", " "): ids for text, ids in known.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.known[text]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (dict(bad=[5], _bad=[6]), [(5,), (6,)]),
        (dict(bad=[5, 7], _bad=[6, 7]), [(5, 7), (6, 7)]),
        (dict(bad=[5, 7], _bad=[8]), [(5, 7)]),  # another number of tokens
        (dict(bad=[5, 7], _bad=[5, 9]), [(5, 7)]),  # the same first token
        (dict(bad=[5], _bad=[5]), [(5,)]),
        (dict(bad=[5], _bad=[]), [(5,)]),
    ],
)
def test_a_space_counts_where_it_makes_another_first_token(known, expected):
    for word in ("bad", " bad", "\t bad"):
        assert spellings(Written(**known), [word]) == expected


def test_words_that_make_no_token_or_cannot_be_read_are_refused():
    for tokenizer, message in (
        (Written(bad=[], _bad=[5]), "bad_words holds 'bad', of which the tokenizer makes no token: leave it out"),
        (Written(), "the tokenizer cannot read the bad word 'bad': 'bad'"),
    ):
        with pytest.raises(RequestError, match=message) as error:
            spellings(tokenizer, ["bad"])
        assert error.value.field == "bad_words"


def test_equal_spellings_count_once_and_tokens_that_the_model_lacks_never_come():
    tokenizer = Written(a=[5], _a=[6], b=[6], _b=[5], c=[7, 40], _c=[39, 3])
    limits = token_limits((), None, ("a", "b", "c"), tokenizer, 40)
    assert limits == TokenLimits(words=((5,), (6,), (39, 3)))


@pytest.mark.parametrize("kind", ["qwen", "llama 3", "mistral"])
def test_spellings_of_trained_tokenizers_are_the_word_with_and_without_a_space(kind):
    tokenizer = make_tokenizer(kind)
    special = {tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>")}
    with_space = []
    for word in ("tokens", "block", "тест", "難しい", "it's", "rows that share"):
        found = spellings(tokenizer, [word])
        texts = [tokenizer.decode(list(ids)).replace("▁", " ") for ids in found]
        assert ["".join(text.split()) for text in texts] == ["".join(word.split())] * len(found)
        assert not special & {token for ids in found for token in ids}
        with_space += [word] if len(found) == 2 else []
    assert with_space == ([] if kind == "mistral" else ["it's"]), "mistral's always begins with one"
