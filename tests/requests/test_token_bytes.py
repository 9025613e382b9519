"""The bytes of single tokens, and where in a text each token begins."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from trained_tokenizers import make_tokenizer
from transformers import PreTrainedTokenizerFast

from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.text_offsets import text_offsets
from nanoinfer.requests.token_bytes import TokenBytes

TEXTS = ["a🙂é東b", "The cache holds blocks.  漢字は難しい。", "👨‍👩‍👧‍👦 🇩🇪 naïve\n\tcafé", "ü"]
SPACES = normalizers.Replace(" ", "▁")


def byte_level():
    return make_tokenizer("qwen")


def byte_fallback(**prepends):
    """As Gemma's and Llama 2's: letters and words with their blanks, and tokens of bytes for what is in none."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁.,ehtacT漢", "th", "the", "▁c"]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, [("t", "h"), ("th", "e"), ("▁", "c")],
        unk_token="<unk>", byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([*map(normalizers.Prepend, prepends.values()), SPACES])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = {"byte-level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def ids_of(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text
    return token_ids


def places(tokenizer, token_ids):
    """How many whole characters stand before each token, by the bytes of those before it."""
    of = TokenBytes(tokenizer)
    before = [b"".join(of[one] for one in token_ids[:number]) for number in range(len(token_ids))]
    return [len(one.decode(errors="ignore")) for one in before]


# Bytes


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_joined_are_those_of_the_text(tokenizer, text):
    token_ids, of = ids_of(tokenizer, text), TokenBytes(tokenizer)
    assert any("\ufffd" in tokenizer.decode([one]) for one in token_ids), "a character spans tokens"
    assert b"".join(of[one] for one in token_ids) == text.encode()


def test_each_byte_is_a_token(tokenizer):
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = [tokenizer.get_vocab().get(one) for one in alphabet]
    found = {TokenBytes(tokenizer)[one] for one in ids if one is not None}
    assert found >= {bytes([byte]) for byte in range(256)}


def test_added_tokens_have_the_bytes_of_their_texts(tokenizer):
    """In the alphabet of bytes "ü" is byte 252; DeepSeek's vocabularies have it as a token of its own."""
    added = ["ü", "漢 字", "<0x41", "▁"]
    tokenizer.add_tokens(added)
    of = TokenBytes(tokenizer)
    for text in [*added, "<s>"]:
        assert of[tokenizer.convert_tokens_to_ids(text)] == text.encode()


def test_of_what_is_no_token_and_of_other_tokenizers_nothing_is_known(tokenizer):
    assert TokenBytes(tokenizer)[len(tokenizer) + 5] is None
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words))[1] is None
    assert TokenBytes(None)[1] is None


# Offsets


@pytest.mark.parametrize("text", TEXTS)
def test_a_generated_token_stands_where_its_first_character_begins(tokenizer, text):
    token_ids = ids_of(tokenizer, text)
    for prompt in ([], tokenizer.encode("Before ", add_special_tokens=False)):
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt)
        detokenizer.append(token_ids)
        detokenizer.flush()
        assert detokenizer.offsets == places(tokenizer, token_ids)
        assert detokenizer.num_chars == len(text) == len(detokenizer.text)


def test_offsets_do_not_depend_on_what_is_held_back_for_a_stop_string(tokenizer):
    text = "a🙂é東b"
    token_ids = ids_of(tokenizer, text)
    detokenizer = Detokenizer(tokenizer, stop=["東bc"])
    detokenizer.append(token_ids)
    assert detokenizer.text == "a🙂é", "the rest may begin the stop string"
    assert detokenizer.offsets == places(tokenizer, token_ids) and detokenizer.num_chars == len(text)
    cut = Detokenizer(tokenizer, stop=["東"])
    cut.append(token_ids)
    assert cut.offsets == places(tokenizer, token_ids)[: cut.num_tokens] and cut.num_tokens < len(token_ids)


def test_a_character_that_never_comes_counts_as_it_is_shown(tokenizer):
    half = ids_of(tokenizer, "aé🙂")[:-1]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.append(half)
    assert detokenizer.num_chars == 2
    detokenizer.flush()
    assert detokenizer.text.startswith("aé\ufffd") and detokenizer.num_chars == len(detokenizer.text)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_prompt_stand_where_they_do_in_its_text(tokenizer, text):
    token_ids = ids_of(tokenizer, text)
    bare, begin, end = places(tokenizer, token_ids), *tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    assert list(text_offsets(tokenizer, text, token_ids)) == bare
    assert list(text_offsets(tokenizer, text, [begin, *token_ids, end])) == [0, *bare, len(text)], "the text has none"
    spelt = tokenizer.decode([begin])
    assert list(text_offsets(tokenizer, spelt + text, [begin, *token_ids])) == [0, *(len(spelt) + at for at in bare)]
    assert list(text_offsets(None, "", token_ids)) == [0] * len(token_ids)


def test_a_blank_that_a_tokenizer_puts_in_front_is_none_of_the_text():
    tokenizer = byte_fallback(front="▁")
    token_ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.decode(token_ids) == " the cat" and tokenizer.convert_ids_to_tokens(token_ids)[:2] == ["▁", "the"]
    for begin in ([], [0]):
        found = list(text_offsets(tokenizer, "the cat", [*begin, *token_ids, 1]))
        assert found == [0] * len(begin) + [0, 0, 3, 5, 6, 7]
