"""Log-probabilities of tokens that are no whole characters, and of several tokens with one text."""

import asyncio
import json

import pytest
from scripted import ROOM, make_speaking_checkpoint, saying
from serving import events, serving

from nanoinfer.outputs import Logprob, RequestMetrics, StreamOutput
from nanoinfer.requests.token_bytes import TokenBytes
from nanoinfer.serve.answers import CompletionAnswer
from nanoinfer.serve.protocol import CompletionRequest

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SAID = "Oh 🙂 東é!"
PROMPT = "Né 🙂 "
CHAT = "/v1/chat/completions"
LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_speaking_checkpoint(tmp_path_factory.mktemp("speaking"), TEMPLATE)


def ask(path, url, *texts, **body):
    """The whole answer, the events of the streamed one, and the tokenizer."""

    async def ask():
        async with serving(path, **ROOM) as served:
            tokenizer = served.async_engine.prompts.tokenizer
            with saying(tokenizer, *texts):
                whole = await served.post(url, n=len(texts), temperature=0, **body)
                streamed = await served.post(url, n=len(texts), temperature=0, stream=True, **body)
            assert whole.status_code == 200, whole.text
            return whole.json(), events(streamed.text), tokenizer

    return asyncio.run(ask())


def joined(parts, index, read):
    return sum((read(one) for part in parts for one in part["choices"] if one["index"] == index), [])


def whole_characters(tokenizer, token_ids):
    """How many stand before each token."""
    of = TokenBytes(tokenizer)
    return [len(b"".join(of[one] for one in token_ids[:n]).decode(errors="ignore")) for n in range(len(token_ids))]


def test_bytes_of_a_chats_tokens_are_those_of_its_text(path):
    asked = dict(messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=20, return_token_ids=True)
    whole, parts, tokenizer = ask(path, CHAT, SAID, "é", **asked)
    for choice, text in zip(whole["choices"], (SAID, "é"), strict=True):
        entries = choice["logprobs"]["content"]
        assert choice["message"]["content"] == text
        assert b"".join(bytes(one["bytes"]) for one in entries[:-1]) == text.encode()
        assert "\ufffd" in "".join(one["token"] for one in entries), "a character spans tokens"
        of, shown = TokenBytes(tokenizer), {bytes(top["bytes"]) for one in entries for top in one["top_logprobs"]}
        assert shown <= {of[one] or b"" for one in range(800)} and b"\xef\xbf\xbd" not in shown
        assert joined(parts, choice["index"], lambda one: (one["logprobs"] or {"content": []})["content"]) == entries


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_a_completion_are_places_in_its_text(path, echo):
    asked = dict(prompt=PROMPT, logprobs=3, echo=echo, return_token_ids=True)
    whole, parts, tokenizer = ask(path, "/v1/completions", SAID, "é🙂", **asked)
    for choice, text in zip(whole["choices"], (SAID, "é🙂"), strict=True):
        found, front = choice["logprobs"], PROMPT * echo
        assert choice["text"] == front + text
        generated = whole_characters(tokenizer, choice["token_ids"])
        prompt = whole_characters(tokenizer, choice["prompt_token_ids"]) * echo
        assert found["text_offset"] == prompt + [len(front) + at for at in generated]
        for name in LISTS:
            assert joined(parts, choice["index"], lambda one: one["logprobs"][name]) == found[name]


def test_a_stop_string_leaves_offsets_where_they_were(path):
    asked = dict(prompt="Hi", logprobs=0, stop=["東"], return_token_ids=True)
    whole, parts, tokenizer = ask(path, "/v1/completions", SAID, **asked)
    (choice,) = whole["choices"]
    assert choice["text"] == "Oh 🙂 " and choice["stop_reason"] == "東"
    found = choice["logprobs"]["text_offset"]
    assert found == whole_characters(tokenizer, choice["token_ids"]) and found[-1] == len(choice["text"])
    assert joined(parts, 0, lambda one: one["logprobs"]["text_offset"]) == found


def test_parts_of_characters_are_named_by_their_bytes_and_no_entry_is_lost(path):
    """The 128 bytes that begin no text are all U+FFFD alone."""
    asked = dict(prompt="Hi", logprobs=20, return_token_ids=True)
    whole, _, tokenizer = ask(path, "/v1/completions", SAID, **asked)
    (choice,), of = whole["choices"], TokenBytes(tokenizer)
    names, top = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
    assert all(name in entry and len(entry) in (20, 21) for name, entry in zip(names, top, strict=True))
    for name, one in zip(names, choice["token_ids"], strict=True):
        part = "".join(f"\\x{byte:02x}" for byte in of[one])
        assert name == (f"bytes:{part}" if "\ufffd" in tokenizer.decode([one]) else tokenizer.decode([one]))
    assert any(name.startswith("bytes:") for name in names)


# Without an engine


class Bytes(dict):
    def __missing__(self, token_id):
        return None


def answer_of(entry, token_bytes, *, logprobs=5):
    asked = CompletionRequest(prompt=[5], logprobs=logprobs)
    answer = CompletionAnswer(asked, "m", [(None, [5])], True, None, token_bytes)
    output = StreamOutput(
        request_id="r", index=0, text_delta="", token_ids_delta=[next(iter(entry))], logprobs_delta=[entry],
        text_offsets_delta=[0], finished=True, finish_reason="length", metrics=RequestMetrics(arrival_time=0.0),
    )  # fmt: skip
    body = json.loads(b"".join(answer.whole([(0, output)])))
    return body["choices"][0]["logprobs"]


def entry_of(*texts):
    return {at: Logprob(logprob=-float(at), rank=at, decoded_token=text) for at, text in enumerate(texts, start=1)}


def test_tokens_of_one_text_have_names_of_their_own():
    found = answer_of(entry_of("a", "a", "a", "b"), Bytes({1: b"a", 2: b" a", 3: b" a", 4: b"b"}))
    assert found["tokens"] == ["a"]
    assert found["top_logprobs"] == [{"a": -1.0, " a": -2.0, "token_id:3": -3.0, "b": -4.0}]


def test_a_chosen_token_keeps_its_name_among_those_of_its_text():
    entry = entry_of("a", "a", "b")
    entry = {2: entry[2], 1: entry[1], 3: entry[3]}
    found = answer_of(entry, Bytes({1: b" a", 2: b"a"}))
    assert found["tokens"] == ["a"] and found["top_logprobs"] == [{"a": -2.0, " a": -1.0, "b": -3.0}]


def test_where_the_bytes_are_not_known_the_text_is_the_name():
    found = answer_of(entry_of("\ufffd", "\ufffd"), Bytes())
    assert found["tokens"] == ["\ufffd"] and found["top_logprobs"] == [{"\ufffd": -1.0, "token_id:2": -2.0}]
