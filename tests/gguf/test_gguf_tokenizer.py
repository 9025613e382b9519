"""The tokenizer of a file gives the tokens that llama.cpp gives, and keeps to what the file says.

tools/gguf_token_ids.py writes token_ids.json: strings, vocabularies and the ids that llama-tokenize gave.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoinfer.gguf.end_tokens import end_tokens
from nanoinfer.gguf.pre import PRE
from nanoinfer.gguf.tokenizer import tokenizer_of
from nanoinfer.requests.detokenizer import Detokenizer

KNOWN = json.loads(Path(__file__).with_name("token_ids.json").read_text())
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, UNKNOWN, SPECIAL, ADDED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def named(**values):
    """Keys of tokenizer.ggml."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_pairs(more=(), merges=(), types=None, **others):
    """A vocabulary of the letters of bytes and some tokens more."""
    tokens = LETTERS + list(more)
    kinds = [NORMAL] * len(LETTERS) + list(types or [NORMAL] * len(more))
    found = named(model="gpt2", pre="gpt-2", tokens=tokens, merges=list(merges), token_type=kinds)
    return found | named(**others)


def pieces(more, scores=None, types=None, **others):
    """SentencePiece's: unknown, begin, end, 256 bytes, and some tokens more."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *more]
    kinds = [UNKNOWN, SPECIAL, SPECIAL] + [BYTE] * 256 + list(types or [NORMAL] * len(more))
    scores = [0.0] * 259 + list(scores or [-float(at) for at in range(len(more))])
    return named(model="llama", tokens=tokens, token_type=kinds, scores=scores) | named(**others)


def characters(more, merges, types=None, **others):
    """Gemma 4's: its special tokens, 256 bytes, and some tokens more."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *more]
    kinds = [SPECIAL, SPECIAL, SPECIAL, UNKNOWN] + [BYTE] * 256 + list(types or [NORMAL] * len(more))
    found = named(model="gemma4", tokens=tokens, token_type=kinds, merges=list(merges), bos_token_id=2, eos_token_id=1)
    return found | named(unknown_token_id=3, add_space_prefix=False, **others)


def texts_of(metadata, text, **options):
    tokenizer = tokenizer_of(metadata)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))


@pytest.mark.parametrize("case", KNOWN["cases"], ids=lambda case: str(next(iter(case["changed"].values()))))
def test_tokens_are_those_of_llama_tokenize(case):
    tokenizer = tokenizer_of(KNOWN["vocabularies"][case["vocabulary"]] | case["changed"])
    for text, ids in zip(KNOWN["strings"], case["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        if case["vocabulary"] == "byte pairs":
            assert tokenizer.decode(ids) == text


def test_every_rule_was_compared_and_no_two_cut_alike():
    by_name = {case["changed"].get("tokenizer.ggml.pre"): json.dumps(case["ids"]) for case in KNOWN["cases"]}
    assert by_name.keys() >= PRE.keys()
    for name in PRE:
        for other in PRE:
            # The strings have words for which ignored merges count.
            alike = (PRE[name].patterns, PRE[name].ignores_merges) == (PRE[other].patterns, PRE[other].ignores_merges)
            assert (by_name[name] == by_name[other]) == alike, (name, other)


def test_a_file_without_a_tokenizer_has_none():
    for metadata in ({}, named(model="none"), named(model="no_vocab")):
        assert tokenizer_of(metadata) is None
        assert end_tokens(metadata) == []


@pytest.mark.parametrize("name", ["qwen35", "llama3", "", "x" * 10000])
def test_another_rule_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is .*supported are .*skip_tokenizer_init") as raised:
        tokenizer_of(byte_pairs() | named(pre=name))
    assert repr(name)[:20] in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize("model", ["bert", "t5", "gemma5", 3, ["gpt2"], np.zeros(2)])
def test_another_kind_of_tokenizer_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model is .*only 'gpt2'"):
        tokenizer_of(byte_pairs() | named(model=model))


def test_numpy_arrays_and_lists_are_the_same():
    metadata = KNOWN["vocabularies"]["sentencepiece"]
    arrays = {key: np.array(metadata[f"tokenizer.ggml.{key}"]) for key in ("scores", "token_type")}
    text = KNOWN["strings"][2]
    assert texts_of(metadata, text) == texts_of(metadata | named(**arrays), text)


@pytest.mark.parametrize(
    ("changed", "begins", "ends"),
    [
        ({}, False, False),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "tekken"}, True, False),
        ({"pre": "lfm2"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_eos_token": True}, False, True),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_begin_and_end_are_added_as_the_file_says(changed, begins, ends):
    metadata = byte_pairs(["<b>", "<e>"], types=[SPECIAL, SPECIAL], bos_token_id=256, eos_token_id=257)
    tokenizer = tokenizer_of(metadata | named(**changed))
    assert tokenizer.encode("a") == [256] * begins + [LETTERS.index("a")] + [257] * ends
    assert (tokenizer.add_bos_token, tokenizer.add_eos_token) == (begins, ends)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<b>", "<e>")


def test_sentencepiece_begins_with_its_begin_token_and_a_space():
    assert texts_of(pieces(["▁", "a"]), "a") == ["<s>", "▁", "a"]
    assert texts_of(pieces(["▁", "a"], add_bos_token=False, add_space_prefix=False), "a") == ["a"]


@pytest.mark.parametrize("flag", [None, False, True])
def test_pairs_of_characters_have_spaces_as_signs_and_bytes_where_no_token_is(flag):
    more = ["▁", "a", "b", "ab", "▁ab", "\n", "\n\n", "b\n", "<|tool_call>"]
    merges = ["a b", "▁ ab", "\n \n", "b \n"]  # of which the last goes beyond a line, and none does
    metadata = characters(more, merges, [NORMAL] * 8 + [ADDED], **({} if flag is None else {"add_bos_token": flag}))
    assert texts_of(metadata, "ab ab\n\n\nab") == ["<bos>", "ab", "▁ab", "\n\n", "\n", "ab"]
    assert texts_of(metadata, "  é<|tool_call>a") == ["<bos>", "▁", "▁", "<0xC3>", "<0xA9>", "<|tool_call>", "a"]
    tokenizer = tokenizer_of(metadata)
    for text in (" ab  b\n\n\né<|tool_call> a", "ab", " "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert end_tokens(metadata | named(tokens=[*metadata["tokenizer.ggml.tokens"], "<turn|>"])) == [1, 269]


def test_a_tag_of_html_is_text_where_another_token_is_an_end():
    more = ["</s>", "<turn|>", "<|tool_response>", "a"]
    metadata = characters(more, [], [NORMAL, SPECIAL, ADDED, NORMAL])
    assert [metadata["tokenizer.ggml.tokens"][at] for at in end_tokens(metadata)] == [
        "<eos>", "<turn|>", "<|tool_response>",
    ]  # fmt: skip
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode([260, 263], skip_special_tokens=True) == "</s>a"
    assert 260 in end_tokens(characters(["</s>"], []))


def test_a_vocabulary_of_one_token_has_no_end():
    metadata = named(model="llama", tokens=["a"], add_bos_token=False, add_space_prefix=False)
    assert end_tokens(metadata) == []
    assert tokenizer_of(metadata).encode("a") == [0]


def test_a_begin_token_that_is_text_stays_text_and_is_added():
    tokenizer = tokenizer_of(byte_pairs(bos_token_id=LETTERS.index("a"), add_bos_token=True))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ba")) == ["a", "b", "a"]
    assert tokenizer.decode([LETTERS.index("a")], skip_special_tokens=True) == "a"


def test_a_padding_token_that_is_text_stays_text():
    tokenizer = tokenizer_of(byte_pairs(padding_token_id=LETTERS.index("a")))
    assert tokenizer.decode([LETTERS.index("a")], skip_special_tokens=True) == "a"
    assert tokenizer.pad_token is None


def test_types_of_tokens():
    kinds = [SPECIAL, ADDED, UNUSED, UNKNOWN]
    tokenizer = tokenizer_of(byte_pairs(["<special>", "<added>", "<unused>", "<unknown>"], types=kinds))
    ids = tokenizer.encode("<special><added><unused><unknown>")
    assert ids[:2] + ids[-1:] == [256, 257, 259] and 258 not in ids
    assert tokenizer.decode([256, 257, 258, 259], skip_special_tokens=True) == "<added><unused>"


def test_an_added_token_of_letters_of_bytes_is_its_text():
    """DeepSeek's "ö" is an added token, and it is GPT-2's letter for byte 0xF6."""
    tokenizer = tokenizer_of(byte_pairs(["öö", "ü."], types=[ADDED, ADDED]))
    assert tokenizer.encode("aöö") == [LETTERS.index("a"), 256]
    assert tokenizer.decode(tokenizer.encode("aööü. ö")) == "aööü. ö"


def test_the_first_of_two_equal_merges_counts():
    metadata = byte_pairs(["ab", "bc"], ["a b", "b c", "a b"])
    assert texts_of(metadata, "abc") == ["ab", "c"]


def test_sentencepiece_merges_by_the_score_of_the_whole():
    """ "abcd": the pair with the highest score first, whatever way its token is cut."""
    more = ["a", "b", "c", "d", "ab", "bc", "cd", "abc", "bcd"]
    metadata = pieces(more, [0, 0, 0, 0, -3, -1, -2, -5, -4], add_space_prefix=False, add_bos_token=False)
    assert texts_of(metadata, "abcd") == ["a", "bcd"]
    metadata = pieces(more, [0, 0, 0, 0, -1, -3, -2, -5, -4], add_space_prefix=False, add_bos_token=False)
    assert texts_of(metadata, "abcd") == ["ab", "cd"]


def test_sentencepiece_falls_back_to_bytes():
    tokenizer = tokenizer_of(pieces(["▁", "a"]))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("é", add_special_tokens=False)) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a é 😀", add_special_tokens=False)) == "a é 😀"


def test_phi_3_has_no_white_space_after_special_tokens():
    metadata = pieces(["▁", "a", "\n", "<|user|>", "<|end|>"], types=[1, 1, 1, SPECIAL, SPECIAL])
    text = "<|user|>\n a<|end|>\n<s> a"
    kept = ["<|user|>", "▁", "\n", "▁", "a", "<|end|>", "▁", "\n", "<s>", "▁", "▁", "a"]
    assert texts_of(metadata, text, add_special_tokens=False) == kept
    metadata |= {"general.name": "Phi-3 Mini 4K"}
    stripped = ["<|user|>", "▁", "a", "<|end|>", "<s>", "▁", "▁", "a"]
    assert texts_of(metadata, text, add_special_tokens=False) == stripped


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["<x>", "<y>", "<z>"], {}, []),
        (["<x>", "<y>", "<z>"], {"eos": 0, "eot": 1, "eom": 2, "bos": 3}, ["<x>", "<y>", "<z>"]),
        (
            ["<|im_end|>", "<|endoftext|>", "<|eom_id|>", "<x>"],
            {"eos": 1},
            ["<|im_end|>", "<|endoftext|>", "<|eom_id|>"],
        ),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos": 0}, ["<|return|>", "<|call|>"]),
        (["<|calls|>", "<|flush|>", "<|end|>"], {"eos": 2}, ["<|calls|>", "<|flush|>"]),
        (["<|return|>", "<|end|>"], {}, ["<|return|>", "<|end|>"]),
        (
            ["<|file_sep|>", "<|repo_name|>", "<reponame>", "<|fim_pad|>"],
            {},
            ["<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"],
        ),
        (["<x>", "<|fim_pad|>"], {"fim_pad": 0}, ["<x>"]),
        (["<|fim_prefix|>", "<|im_start|>", "<｜end▁of▁sentence｜>"], {}, ["<｜end▁of▁sentence｜>"]),
    ],
)
def test_end_tokens(tokens, keys, ends):
    metadata = byte_pairs([*tokens, "<last>"], **{f"{name}_token_id": 256 + at for name, at in keys.items()})
    assert end_tokens(metadata) == sorted(256 + tokens.index(end) for end in ends)


def test_ends_of_the_known_vocabularies_are_those_of_llama_cpp():
    for vocabulary, texts in (
        ("byte pairs", {"<|im_end|>", "<|endoftext|>"}),
        ("sentencepiece", {"<|im_end|>", "<|endoftext|>", "</s>"}),
    ):
        metadata = KNOWN["vocabularies"][vocabulary]
        assert {metadata["tokenizer.ggml.tokens"][at] for at in end_tokens(metadata)} == texts


def test_ends_are_special_whatever_their_type():
    tokenizer = tokenizer_of(byte_pairs(["<|im_end|>", "<|fim_prefix|>"]))
    assert tokenizer.encode("<|im_end|><|fim_prefix|>") == [256, 257]
    assert tokenizer.decode([256, 257, LETTERS.index("a")], skip_special_tokens=True) == "a"


def test_templates():
    messages = [{"role": "user", "content": "Hi"}]
    plain = {"tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    metadata = byte_pairs(["<e>"], types=[SPECIAL], eos_token_id=256)
    assert not tokenizer_of(metadata).chat_template
    assert tokenizer_of(metadata | plain).apply_chat_template(messages, tokenize=False) == "Hi<e>"
    tokenizer = tokenizer_of(metadata | plain | {"tokenizer.chat_template.tool_use": "tools"})
    assert tokenizer.chat_template == {"default": plain["tokenizer.chat_template"], "tool_use": "tools"}
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "Hi<e>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="tool_use") == "tools"
    with pytest.raises(ValueError, match="the chat template 'default' is 3"):
        tokenizer_of(metadata | {"tokenizer.chat_template": 3})


@pytest.mark.parametrize("vocabulary", ["byte pairs", "sentencepiece"])
def test_text_comes_whole_from_tokens_that_cut_characters(vocabulary):
    tokenizer = tokenizer_of(KNOWN["vocabularies"][vocabulary])

    def ids(data):
        as_text = [f"<0x{byte:02X}>" for byte in data]
        if vocabulary == "byte pairs":
            as_text = [bytes_to_unicode()[byte] for byte in data]
        return tokenizer.convert_tokens_to_ids(as_text)

    text = "a😀é日"
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.append([at])[0] for at in ids(text.encode())]
    assert [delta for delta in deltas if delta] == list(text)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.append(ids("é".encode()[:1])) == ("", None)
    assert detokenizer.flush() == "\ufffd"


def test_merges_of_sentencepiece_are_kept(cache, monkeypatch):
    metadata = KNOWN["vocabularies"]["sentencepiece"]
    first = texts_of(metadata, KNOWN["strings"][0])
    (kept,) = (cache / "nanoinfer" / "merges").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("nanoinfer.gguf.sentencepiece._pairs", None)
        assert texts_of(metadata, KNOWN["strings"][0]) == first
        with pytest.raises(TypeError):  # other scores are another vocabulary
            tokenizer_of(metadata | named(scores=metadata["tokenizer.ggml.scores"][::-1]))
    for damaged in (b"", kept.read_bytes()[:-1], kept.read_bytes()[:-1] + b"?"):
        kept.write_bytes(damaged)
        assert texts_of(metadata, KNOWN["strings"][0]) == first
    cache.rename(cache.with_name("elsewhere"))
    cache.write_text("no directory")
    assert texts_of(metadata, KNOWN["strings"][0]) == first


HOSTILE = {
    "no tokens": (named(tokens=None), "tokens is None"),
    "an empty list": (named(tokens=[]), "has 0 tokens with"),
    "no texts": (named(tokens=[1, 2]), "list of texts"),
    "bytes that are no UTF-8": (named(tokens=[b"\xff"]), "UTF-8"),
    "a token twice": (named(tokens=[*LETTERS, "a"], token_type=[1] * 257), "'a' twice"),
    "a long token": (named(tokens=[*LETTERS, "x" * 5000], token_type=[1] * 257), "5,000 in the longest"),
    "types of few tokens": (named(token_type=[1, 1]), "a number for each of 256 tokens"),
    "types as text": (named(token_type=["x"] * 256), "a number for each"),
    "types in rows": (named(token_type=[[1], [1, 2]]), "a number for each"),
    "an unknown type": (named(token_type=[1] * 255 + [7]), "types are 0 to 6"),
    "a negative type": (named(token_type=[1] * 255 + [-1]), "types are 0 to 6"),
    "an id outside": (named(eos_token_id=256), r"eos_token_id is 256: the file has tokens 0 to 255"),
    "a negative id": (named(bos_token_id=-1), "bos_token_id is -1"),
    "an id of 2^64": (named(padding_token_id=2**64 - 1), "padding_token_id is"),
    "an id that is a flag": (named(bos_token_id=True), "bos_token_id is True"),
    "an id that is text": (named(eot_token_id="x"), "eot_token_id is 'x'"),
    "a flag that is text": (named(add_bos_token="yes"), "true or false"),
    "no begin token": (named(add_bos_token=True), "no tokenizer.ggml.bos_token_id"),
    "no end token": (named(add_eos_token=True), "no tokenizer.ggml.eos_token_id"),
    "no merges": (named(merges=None), "merges is None"),
    "a merge of one token": (named(merges=["ab"]), "merges has 'ab'"),
    "a merge of no tokens": (named(merges=["xyz q"]), "does not fit the tokens"),
    "a merge to no token": (named(merges=["a b"]), "does not fit the tokens"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused(name):
    changed, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        tokenizer_of(byte_pairs() | changed)


@pytest.mark.parametrize(
    ("scores", "message"), [([0.0], "a number for each"), ([float("nan")] * 260, "no numbers"), (["x"] * 260, "each")]
)
def test_hostile_scores_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_of(pieces(["a"]) | named(scores=scores))


def test_a_token_without_text_is_never_found():
    tokenizer = tokenizer_of(byte_pairs(["", "x y", ""]))
    assert len(tokenizer) == 259
    assert max(tokenizer.encode("EMPTY a b")) < 256
