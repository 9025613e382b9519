"""Incremental text equals the full decode, and stop strings are found wherever tokens cut them."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanoinfer.requests.detokenizer import MAX_WAITING_TOKENS, Detokenizer, TokenTexts

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln, señor: naïve café.",
    "Жили-были дед и баба. 東京は大きい。 한국어도 됩니다.",
    "Emoji 🙂🙃 and flags 🇩🇪, families 👨‍👩‍👧‍👦, done.",
]


@pytest.fixture(scope="module")
def byte_bpe():
    """A byte-level BPE with few merges, so that most non-ASCII characters span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def metaspace():
    """Like Llama 2's: a word's token carries its space, which a decode drops at the beginning; bytes as a fallback."""
    pieces = ["<unk>", "</s>", "▁Hello", "▁world", "!", "▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def full_decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(detokenizer, ids, size=1):
    """Deltas of appending `ids`, `size` at a time, the flush last, and the stop string found."""
    deltas = []
    for start in range(0, len(ids), size):
        delta, hit = detokenizer.append(ids[start : start + size])
        deltas.append(delta)
        if hit:
            break
    return deltas + [detokenizer.flush()], detokenizer.stop_hit


@pytest.mark.parametrize("text", CORPUS)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_deltas_joined_equal_the_full_decode(byte_bpe, text, size):
    ids = byte_bpe.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(byte_bpe)
    deltas, hit = stream(detokenizer, ids, size)
    assert "".join(deltas) == detokenizer.text == full_decode(byte_bpe, ids) == text
    assert hit is None and detokenizer.num_tokens == len(ids)


def test_no_delta_holds_half_a_character(byte_bpe):
    ids = byte_bpe.encode("a🙂é東", add_special_tokens=False)
    assert len(ids) > 4  # the characters do span tokens
    deltas, _ = stream(Detokenizer(byte_bpe), ids)
    assert [delta for delta in deltas if delta] == ["a", "🙂", "é", "東"]


def test_prompt_is_context_but_not_output(byte_bpe):
    prompt = byte_bpe.encode("Emoji and text before", add_special_tokens=False)
    ids = byte_bpe.encode(" the 🙂 fox", add_special_tokens=False)
    deltas, _ = stream(Detokenizer(byte_bpe, prompt_token_ids=prompt), ids)
    assert "".join(deltas) == " the 🙂 fox"


def test_leading_space_survives_after_a_prompt_and_between_tokens(metaspace):
    hello, world, bang = metaspace.convert_tokens_to_ids(["▁Hello", "▁world", "!"])
    assert full_decode(metaspace, [world]) == "world"
    deltas, _ = stream(Detokenizer(metaspace, prompt_token_ids=[hello]), [world, world, bang])
    assert deltas == [" world", " world", "!", ""]
    deltas, _ = stream(Detokenizer(metaspace), [hello, world, bang])
    assert deltas == ["Hello", " world", "!", ""]


def test_leading_space_survives_special_tokens_without_text(metaspace):
    hello, world, end = metaspace.convert_tokens_to_ids(["▁Hello", "▁world", "</s>"])
    for num_special in (1, MAX_WAITING_TOKENS, 3 * MAX_WAITING_TOKENS + 1):
        deltas, _ = stream(Detokenizer(metaspace), [hello, *[end] * num_special, world])
        assert "".join(deltas) == "Hello world"


def test_byte_fallback_characters_come_whole(metaspace):
    ids = metaspace.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "é🙂東".encode()])
    deltas, _ = stream(Detokenizer(metaspace), ids)
    assert [delta for delta in deltas if delta] == ["é", "🙂", "東"]


def test_special_tokens_show_when_asked_for(byte_bpe):
    ids = [*byte_bpe.encode("fox", add_special_tokens=False), byte_bpe.eos_token_id]
    assert "".join(stream(Detokenizer(byte_bpe), ids)[0]) == "fox"
    assert "".join(stream(Detokenizer(byte_bpe, skip_special_tokens=False), ids)[0]) == "fox<|end|>"


def test_unfinished_character_comes_out_at_the_flush(byte_bpe):
    ids = byte_bpe.encode("ok🙂", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(byte_bpe)
    detokenizer.append(ids)
    assert detokenizer.text == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.text == full_decode(byte_bpe, ids)


def lengths_of_calls(tokenizer, monkeypatch):
    """How many tokens each call of the tokenizer decodes from now on."""
    found, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **how: found.append(len(ids)) or decode(ids, **how))
    return found


def test_endless_invalid_bytes_keep_coming_out_and_the_window_stays_small(byte_bpe, monkeypatch):
    lead_byte = byte_bpe.convert_tokens_to_ids(
        pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é")[0][0][0]
    )
    detokenizer, decoded_lengths = Detokenizer(byte_bpe), lengths_of_calls(byte_bpe, monkeypatch)
    detokenizer.append([lead_byte] * 200)
    assert len(detokenizer.text) > 150
    assert max(decoded_lengths) <= 2 * MAX_WAITING_TOKENS
    assert detokenizer.append(byte_bpe.encode(" fox.", add_special_tokens=False))[0].endswith(" fox.")


def test_endless_tokens_without_text_keep_the_window_small(metaspace, monkeypatch):
    world, end = metaspace.convert_tokens_to_ids(["▁world", "</s>"])
    detokenizer, decoded_lengths = Detokenizer(metaspace), lengths_of_calls(metaspace, monkeypatch)
    detokenizer.append([world, *[end] * 200, world])
    assert detokenizer.text == "world world" and max(decoded_lengths) <= 2 * MAX_WAITING_TOKENS


def test_cost_per_token_does_not_grow_with_the_text(byte_bpe, monkeypatch):
    detokenizer, decoded_lengths = Detokenizer(byte_bpe), lengths_of_calls(byte_bpe, monkeypatch)
    ids = byte_bpe.encode(" the fox 🙂" * 50, add_special_tokens=False)
    detokenizer.append(ids)
    assert max(decoded_lengths) <= 2 * 4 and len(decoded_lengths) <= 2 * len(ids)


def test_stop_string_across_token_edges_ends_the_text_before_it(byte_bpe):
    ids = byte_bpe.encode("The fox jumps over", add_special_tokens=False)
    pieces = [full_decode(byte_bpe, [i]) for i in ids]
    stop = "ox ju"
    assert not any(stop in piece for piece in pieces)
    for size in (1, 3, len(ids)):
        deltas, hit = stream(Detokenizer(byte_bpe, [stop]), ids, size)
        assert ("".join(deltas), hit) == ("The f", stop)


def test_stop_string_within_one_token_ends_the_text_before_it(metaspace):
    ids = metaspace.convert_tokens_to_ids(["▁Hello", "▁world", "!"])
    deltas, hit = stream(Detokenizer(metaspace, ["or"]), ids)
    assert ("".join(deltas), hit) == ("Hello w", "or")


def test_stop_string_of_multibyte_characters_is_found(byte_bpe):
    ids = byte_bpe.encode("ab🙂🙃cd", add_special_tokens=False)
    deltas, hit = stream(Detokenizer(byte_bpe, ["🙂🙃"]), ids)
    assert ("".join(deltas), hit) == ("ab", "🙂🙃")


def test_text_that_may_become_a_stop_string_is_held_back_and_released_when_it_cannot(byte_bpe):
    detokenizer = Detokenizer(byte_bpe, ["xxyz", "q!"])
    deltas = [detokenizer.append(byte_bpe.encode(char, add_special_tokens=False))[0] for char in "axxxy.q"]
    assert deltas == ["a", "", "", "x", "", "xxy.", ""]
    assert detokenizer.text == "axxxy."
    assert detokenizer.flush() == "q"


def test_tokens_after_a_stop_string_are_ignored(byte_bpe):
    ids = byte_bpe.encode("abSTOPcd", add_special_tokens=False)
    detokenizer = Detokenizer(byte_bpe, ["STOP"])
    delta, hit = detokenizer.append(ids)
    assert (delta, hit) == ("ab", "STOP")
    num_needed = detokenizer.num_tokens
    assert "STOP" in full_decode(byte_bpe, ids[:num_needed])
    assert "STOP" not in full_decode(byte_bpe, ids[: num_needed - 1])
    assert detokenizer.append(ids) == ("", "STOP")
    assert detokenizer.num_tokens == num_needed and detokenizer.flush() == "" and detokenizer.text == "ab"


def test_stop_string_that_is_complete_first_wins_however_many_tokens_come_at_once(byte_bpe):
    for text, stops, expected in [
        ("abcd", ["bcd", "c"], ("ab", "c")),
        ("abcd", ["c", "bc"], ("a", "bc")),
        ("abcabd", ["abd", "ca"], ("ab", "ca")),
    ]:
        ids = [byte_bpe.encode(char, add_special_tokens=False)[0] for char in text]
        for size in (1, 2, len(ids)):
            deltas, hit = stream(Detokenizer(byte_bpe, stops), ids, size)
            assert ("".join(deltas), hit) == expected


def test_stop_strings_within_min_tokens_are_text(byte_bpe):
    ids = [byte_bpe.encode(char, add_special_tokens=False)[0] for char in "a##b##c"]
    for min_tokens, expected in [(0, ("a", "##")), (2, ("a", "##")), (3, ("a##b", "##")), (7, ("a##b##c", None))]:
        deltas, hit = stream(Detokenizer(byte_bpe, ["##"], min_tokens=min_tokens), ids)
        assert ("".join(deltas), hit) == expected


def test_stop_string_in_waiting_text_is_found_at_the_flush(byte_bpe):
    ids = byte_bpe.encode("é", add_special_tokens=False)[:1]
    detokenizer = Detokenizer(byte_bpe, ["\ufffd"])
    assert detokenizer.append([*byte_bpe.encode("ab", add_special_tokens=False), *ids]) == ("ab", None)
    assert detokenizer.flush() == "" and detokenizer.stop_hit == "\ufffd" and detokenizer.text == "ab"


def test_stop_search_agrees_with_a_search_of_the_whole_text(byte_bpe):
    rng = random.Random(0)
    letter = {char: byte_bpe.encode(char, add_special_tokens=False)[0] for char in "ab"}
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        deltas, hit = stream(Detokenizer(byte_bpe, stops), [letter[c] for c in text], rng.randint(1, 4))
        ends = [end for end in range(1, 13) if any(text[:end].endswith(stop) for stop in stops)]
        expected = text
        if ends:
            longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
            expected = text[: ends[0] - len(longest)]
            assert hit == longest
        else:
            assert hit is None
        assert "".join(deltas) == expected


def test_without_a_tokenizer_there_is_no_text_and_tokens_are_counted():
    detokenizer = Detokenizer(None, ["stop"], [1, 2, 3])
    assert detokenizer.append([4, 5]) == ("", None)
    assert detokenizer.flush() == "" and detokenizer.text == "" and detokenizer.num_tokens == 2
    assert TokenTexts(None)[4] is None


def test_token_text_shows_special_tokens(byte_bpe):
    texts = TokenTexts(byte_bpe)
    assert texts[byte_bpe.eos_token_id] == "<|end|>"
    assert texts[byte_bpe.encode("a", add_special_tokens=False)[0]] == "a"


def test_a_token_is_decoded_once(byte_bpe, monkeypatch):
    texts = TokenTexts(byte_bpe)
    wanted = [texts[token_id] for token_id in (5, 9, 5)]
    monkeypatch.setattr(byte_bpe, "decode", None)
    assert [texts[token_id] for token_id in (5, 9, 5)] == wanted
