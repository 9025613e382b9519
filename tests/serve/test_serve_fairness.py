"""Long texts and large bodies: nobody else waits for them, and no work is done that nobody wants."""

import asyncio
import contextlib
import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from serving import LeavingClient, make_served_checkpoint, serving
from trained_tokenizers import make_tokenizer

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.requests.prompts import LONG_CHARS, encode_chat
from nanoinfer.serve import responder, tokenizing, waiting_bytes
from nanoinfer.serve.client import while_client_stays
from nanoinfer.serve.request_stream import ReaderLeft
from nanoinfer.serve.tokenizing import PromptTokenizer

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}{{ tail }}"
PROSE = "The cache holds blocks of tokens. "
LONG = dict(max_tokens=300, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def made(kind: str = "llama 3", max_model_len: int = 10**9):
    """A `PromptTokenizer`."""
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = TEMPLATE
    prompts = PromptTokenizer(tokenizer, SimpleNamespace(tokenize=lambda token_ids: token_ids), max_model_len)
    try:
        yield prompts
    finally:
        prompts.close()


@pytest.fixture
def texts(monkeypatch):
    """The texts that were encoded, or are being."""
    found, encode = [], tokenizing.encode_within

    def recorded(tokenizer, text, *arguments, **how):
        found.append(text)
        return encode(tokenizer, text, *arguments, **how)

    monkeypatch.setattr(tokenizing, "encode_within", recorded)
    return found


# Tokens


@pytest.mark.parametrize("kind", ["llama 3", "qwen", "mistral"])
@pytest.mark.sampled("llama 3", "mistral")
def test_long_texts_and_chats_have_the_tokens_of_the_tokenizer(kind, texts):
    text = PROSE * 2500 + "漢字。" * 9000 + "x" * 70_000 + " the end"
    messages = [{"role": "user", "content": f" {text} "}, {"role": "assistant", "content": "yes"}]
    arguments = dict(variables={"tail": "tail"}, add_generation_prompt=False)

    async def ask():
        with made(kind) as prompts:
            wanted = prompts.tokenizer.encode(text), encode_chat(prompts.tokenizer, messages, **arguments)
            _, token_ids = await prompts.tokenize(text)
            assert token_ids == wanted[0] and texts == [text]
            templated = partial(encode_chat, prompts.tokenizer, messages, **arguments)
            for num_bytes in (100, 10**6):  # the short way and the long one
                _, token_ids = await prompts.tokenize_chat(templated, num_bytes)
                assert token_ids == wanted[1]
            assert len(texts) == 2 and text in texts[1], "of a long chat the text comes first"

    asyncio.run(ask())


def test_long_chats_whose_special_tokens_are_text_have_the_tokens_of_the_whole():
    async def ask():
        with made("qwen") as prompts:
            form = AnswerFormat.of("", {"</s>": prompts.tokenizer.convert_tokens_to_ids("</s>")})
            template = ChatTemplate(prompts.tokenizer, form, spells_special=True)
            templated = partial(template.encode, [{"role": "user", "content": f"{PROSE} </s> " * 2000}])
            found = [(await prompts.tokenize_chat(templated, num_bytes))[1] for num_bytes in (100, 10**6)]
            assert found[0] == found[1] and not set(form.special_ids.values()) & set(found[0])
            assert prompts.tokenizer.decode(found[0]).count("</s>") == 2000

    asyncio.run(ask())


# Work that is not done


def test_of_a_text_that_is_far_too_long_the_beginning_tells():
    async def ask():
        with made(max_model_len=2000) as prompts:
            text, refusal = PROSE * 10**4, f"tokens in {LONG_CHARS} of its .* characters, and max_model_len=2000"
            with pytest.raises(RequestError, match=refusal) as told:
                await prompts.tokenize(text)
            assert told.value.is_too_long
            chat = [{"role": "user", "content": text}]
            with pytest.raises(RequestError, match=refusal):
                await prompts.tokenize_chat(partial(encode_chat, prompts.tokenizer, chat), len(text))

    asyncio.run(ask())


def test_work_whose_caller_has_gone_is_not_begun(monkeypatch):
    may_go_on, begun, texts, inner = threading.Event(), threading.Semaphore(0), [], tokenizing.encode_within

    def slow(tokenizer, text, *arguments, **how):
        texts.append(text)
        begun.release()
        assert may_go_on.wait(30)
        return inner(tokenizer, text, *arguments, **how)

    monkeypatch.setattr(tokenizing, "encode_within", slow)

    async def ask():
        with made() as prompts:
            calls = [asyncio.create_task(prompts.tokenize(letter + PROSE * 3000)) for letter in "AB"]
            calls += [asyncio.create_task(prompts.tokenize(letter)) for letter in "CD"]
            calls += [asyncio.create_task(prompts.aside(1, lambda: texts.append("aside")))]
            for _ in ("long", "short"):  # each lane is at its first text, so that the second one cannot begin
                assert await asyncio.to_thread(begun.acquire, timeout=30)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            may_go_on.set()
            last = await prompts.tokenize("Z"), await prompts.tokenize("Y" + PROSE * 700)
            assert len(last[1][1]) > 1000
            assert not [text for text in texts if text[0] in "BD"], "they had not been begun"

    asyncio.run(ask())


# Turns


@pytest.mark.parametrize("size", [LONG_CHARS // 2, LONG_CHARS * 2])
def test_a_huge_text_is_waited_for_by_huge_ones_alone(size, monkeypatch):
    may_go_on, inner = threading.Event(), tokenizing.encode_within

    def slow(tokenizer, text, *arguments, **how):
        assert len(text) < 250_000 or may_go_on.wait(30)
        return inner(tokenizer, text, *arguments, **how)

    monkeypatch.setattr(tokenizing, "encode_within", slow)

    async def ask():
        with made() as prompts:
            huge = [asyncio.create_task(prompts.tokenize("x" * 300_000)) for _ in range(3)]
            await asyncio.sleep(0.05)
            await asyncio.wait_for(prompts.tokenize("x" * size), 30)
            assert not any(call.done() for call in huge)
            may_go_on.set()
            wanted = prompts.tokenizer.encode("x" * 300_000)
            assert [token_ids for _, token_ids in await asyncio.gather(*huge)] == [wanted] * 3

    asyncio.run(ask())


def test_a_short_text_does_not_wait_for_a_long_one(monkeypatch):
    may_go_on, inner = threading.Event(), tokenizing.encode_within

    def slow(tokenizer, text, *arguments, **how):
        assert len(text) <= LONG_CHARS or may_go_on.wait(30)
        return inner(tokenizer, text, *arguments, **how)

    monkeypatch.setattr(tokenizing, "encode_within", slow)

    async def ask():
        with made() as prompts:
            long = asyncio.create_task(prompts.tokenize(PROSE * 1500))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(prompts.tokenize(PROSE), 30)
            assert not long.done()
            may_go_on.set()
            await long

    asyncio.run(ask())


# Bodies


def test_large_bodies_are_read_beside_the_loop(path, monkeypatch):
    threads = []
    parse = responder.parse

    def recorded(kind, body, *arguments):
        threads.append((len(body) > 65_536, threading.current_thread() is threading.main_thread()))
        return parse(kind, body, *arguments)

    monkeypatch.setattr(responder, "parse", recorded)

    async def ask():
        async with serving(path) as served:
            for text in ("w5", "w5" + " " * 70_000, "w5" + " " * 1_100_000):
                for url, body in (
                    ("/v1/completions", dict(prompt=text, max_tokens=1)),
                    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": text}], max_tokens=1)),
                    ("/tokenize", dict(prompt=text)),
                ):
                    response = await served.post(url, **body)
                    assert response.status_code == 200, response.text
            response = await served.post(prompt="w5" + " " * 70_000, n=0)
            assert response.status_code == 400 and response.json()["error"]["param"] == "n"

    asyncio.run(ask())
    assert sorted(threads) == [(False, True)] * 3 + [(True, False)] * 7


def test_a_large_body_does_not_wait_for_a_huge_one(path, monkeypatch):
    may_go_on, parse = threading.Event(), responder.parse

    def slow(kind, body, *arguments):
        assert len(body) < 2**20 or may_go_on.wait(30)
        return parse(kind, body, *arguments)

    monkeypatch.setattr(responder, "parse", slow)

    async def ask():
        async with serving(path) as served:
            huge = asyncio.create_task(served.post(prompt="w5" + " " * 1_100_000, max_tokens=1))
            await asyncio.sleep(0.05)
            assert (await served.post(prompt="w5" + " " * 70_000, max_tokens=1)).status_code == 200
            assert (await served.client.get("/health")).status_code == 200 and not huge.done()
            may_go_on.set()
            assert (await huge).status_code == 200

    asyncio.run(ask())


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_client_that_leaves_while_its_text_is_tokenised_ends_the_work(path, url):
    async def ask():
        async with serving(path) as served:
            prompts, may_go_on, begun, done = served.async_engine.prompts, threading.Event(), [], []
            inner = prompts.tokenizer.encode
            queue = prompts.threads["aside-short" if url == "/tokenize" else "short"]._work_queue

            def slow(text, **arguments):
                begun.append(1)
                assert may_go_on.wait(30)
                done.append(text[:3])
                return inner(text, **arguments)

            prompts.tokenizer.encode = slow
            chat = url.startswith("/v1/chat")
            if chat:
                prompts.tokenizer.apply_chat_template = lambda messages, **_: slow(messages[0]["content"])

            def body(text):
                return dict(messages=[{"role": "user", "content": text}]) if chat else dict(prompt=text)

            clients = [LeavingClient(served.app, body(f"w{i} "), url) for i in (20, 21, 22)]
            await served.wait_until(lambda _: begun and queue.qsize() == 2)
            for client in clients:
                client.leave()
                await asyncio.wait_for(client.task, 30)
                assert client.messages[0]["status"] == 499
            may_go_on.set()
            assert (await served.post(url, **body("w23 "))).status_code == 200
            assert done[0] == "w20" and done[-1] == "w23" and len(done) == 2, "what nobody wanted was begun"
            stats = await served.wait_until_idle()
            assert stats["num_prefill_tokens"] <= 3, "and nothing of it has run"

    asyncio.run(ask())


def test_work_ends_with_the_one_who_waits_for_it():
    async def ask():
        async def never():
            await asyncio.Event().wait()

        async def endless():
            try:
                await never()
            finally:
                ended.append(1)

        async def left():
            return {"type": "http.disconnect"}

        ended = []
        with pytest.raises(ReaderLeft):
            await while_client_stays(left, endless())
        task = asyncio.create_task(while_client_stays(never, endless()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert len(ended) == 2
        assert len(asyncio.all_tasks()) == 1, "the listener goes on"

    asyncio.run(ask())


# What may wait


def test_a_body_that_does_not_arrive_is_given_up(path):
    async def ask():
        async with serving(path, app_options=dict(body_timeout=0.05)) as served:
            for url in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                client = LeavingClient(served.app, dict(prompt=[5]), url, is_cut=True)
                await asyncio.wait_for(client.task, 30)
                start, body = client.messages
                assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
                error = json.loads(body["body"])["error"]
                assert error["code"] == "body_timeout" and "within 0.05 s" in error["message"]
                assert f"{len(client.sent)} bytes of it have" in error["message"]
            assert (await served.post(prompt=[5], **LONG)).status_code == 200, "the answer may take longer"
            await served.wait_until_idle()

    asyncio.run(ask())


def test_waiting_bytes_beyond_the_limit_are_refused_and_come_back(path, monkeypatch):
    monkeypatch.setattr(waiting_bytes, "MAX_BODY_BYTES", 50_000)
    big = "w5" + " " * 30_000

    async def ask():
        async with serving(path, max_num_seqs=1, limits=dict(max_queue_bytes=50_000)) as served:
            waiting = served.async_engine.waiting
            running = asyncio.create_task(served.post(prompt=[5], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 3)
            assert waiting.num_bytes == 0, "what runs does not wait"
            arriving = LeavingClient(served.app, dict(prompt=big), is_cut=True)
            await served.wait_until(lambda _: waiting.num_bytes > 30_000)
            refused = await served.post(prompt=big)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert "at most 50000 wait" in refused.json()["error"]["message"]
            assert waiting.num_bytes > 30_000
            arriving.leave()
            await arriving.task
            assert waiting.num_bytes == 0
            queued = asyncio.create_task(served.post(prompt=big, max_tokens=2, stream=True))
            await served.wait_until(lambda served: served.async_engine.num_streams == 2)
            assert waiting.num_bytes > 30_000, "it waits for a place"
            assert (await served.post(prompt=big)).status_code == 429
            assert (await served.post(prompt=[5], max_tokens=1)).status_code == 200
            for response in await asyncio.gather(running, queued):
                assert response.status_code == 200
            for body, status in ((dict(prompt=[5], n=0), 400), (dict(prompt=[5] * 400), 400), (dict(prompt=[5]), 200)):
                assert (await served.post(**body)).status_code == status
                assert waiting.num_bytes == 0
            await served.wait_until_idle()

    asyncio.run(ask())


def test_a_body_beyond_the_limit_closes_its_connection(path):
    async def ask():
        async with serving(path) as served:
            response = await served.client.post("/tokenize", content=b" " * (4 * 2**20 + 1))
            assert response.status_code == 413 and response.headers["connection"] == "close"
            assert served.async_engine.waiting.num_bytes == 0

    asyncio.run(ask())
