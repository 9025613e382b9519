"""Clients that leave, send nonsense or come in crowds: nobody else notices."""

import asyncio
import json
import threading
from contextlib import ExitStack

import pytest
from engines import VOCAB
from serving import MODEL, LeavingClient, events, make_served_checkpoint, metrics_of, serving

from nanoinfer import SamplingParams
from nanoinfer.common.other_names import PATHS
from nanoinfer.serve import tokenizing
from nanoinfer.serve.request_stream import ReaderLeft, RequestStream

LONG = dict(max_tokens=120, temperature=0, ignore_eos=True)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_only(path, stream):
    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40, 41], **LONG)
            await served.wait_until_idle()
            leaving = LeavingClient(served.app, dict(prompt=[[20, 21], [22]], n=2, stream=stream, **LONG))
            staying = asyncio.create_task(served.complete([40, 41], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 120 + 20)
            leaving.leave()
            await leaving.task
            assert (await staying)["choices"] == wanted["choices"]
            stats = await served.wait_until_idle()
            assert stats["num_decode_tokens"] < 120 + 120 + 4 * 100, "the request that nobody reads has gone on"
            return await metrics_of(served)

    samples = asyncio.run(ask())
    assert samples["nanoinfer:request_success_total abort"] == 4
    assert samples["nanoinfer:request_success_total length"] == 2


def test_a_client_that_leaves_while_it_waits_gives_up_its_place(path):
    async def ask():
        async with serving(path, max_num_seqs=1) as served:
            running = asyncio.create_task(served.complete([40], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 3)
            leaving = LeavingClient(served.app, dict(prompt=[20], stream=True, **LONG))
            await served.wait_until(lambda served: served.async_engine.num_streams == 2)
            leaving.leave()
            await leaving.task
            await running
            stats = await served.wait_until_idle()
            assert stats["num_prefill_tokens"] == 1, "the one that left has never run"

    asyncio.run(ask())


def test_a_client_that_leaves_without_reading_ends_its_request(path):
    """The server waits in `send` then, because nothing more fits into the connection."""

    async def ask():
        async with serving(path) as served:
            leaving = LeavingClient(served.app, dict(prompt=[20], stream=True, **LONG), num_read=2)
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 3)
            leaving.leave()
            await asyncio.wait_for(leaving.task, 10)
            stats = await served.wait_until_idle()
            assert len(leaving.messages) == 2 and stats["num_decode_tokens"] < 120

    asyncio.run(ask())


def test_a_reader_that_is_cancelled_ends_its_request(path):
    async def ask():
        async with serving(path) as served:
            task = asyncio.create_task(served.complete([20], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await served.wait_until_idle()
            prompts = [await served.async_engine.prompts.tokenize([1, 2])]
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            stream = RequestStream(prompts, params, name="x", wants_deltas=True, arrival=0.0, charge=ExitStack())
            await served.async_engine.submit(stream)
            stream.close()
            with pytest.raises(ReaderLeft):
                while await stream.next():
                    pass
            await served.wait_until_idle()

    asyncio.run(ask())


# What cannot be used

REFUSED = {
    "no prompt": (dict(), "prompt is missing", "prompt"),
    "null prompt": (dict(prompt=None), "prompt holds None", "prompt"),
    "empty text": (dict(prompt=""), "the prompt is empty", "prompt"),
    "no prompts": (dict(prompt=[]), "prompt is an empty list", "prompt"),
    "an empty one": (dict(prompt=[[5], []]), "the prompt is empty", "prompt"),
    "number": (dict(prompt=3), "prompt holds 3", "prompt"),
    "mixture": (dict(prompt=[5, "w5"]), "prompt token 'w5' is outside the vocabulary", "prompt"),
    "out of vocabulary": (dict(prompt=[5, VOCAB]), "outside the vocabulary", "prompt"),
    "huge id": (dict(prompt=[10**40]), "outside the vocabulary", "prompt"),
    "negative id": (dict(prompt=[-1]), "outside the vocabulary", "prompt"),
    "true as id": (dict(prompt=[5, True]), "outside the vocabulary", "prompt"),
    "fraction as id": (dict(prompt=[5, 1.5]), "outside the vocabulary", "prompt"),
    "too long": (dict(prompt=[5] * 400), "max_model_len=384", "prompt"),
    "too long with its output": (dict(prompt=[5] * 300, max_tokens=100), "max_tokens is 100", "max_tokens"),
    "no model": (dict(prompt=[5], model=7), "model is 7", "model"),
    "n = 0": (dict(prompt=[5], n=0), "n is 0", "n"),
    "huge n": (dict(prompt=[5], n=10**9), "less than or equal to 128", "n"),
    "many completions": (dict(prompt=[[5]] * 65, n=2), "130 completions", "prompt"),
    "n is text": (dict(prompt=[5], n="2"), "n is '2'", "n"),
    "n is true": (dict(prompt=[5], n=True), "n is True", "n"),
    "max_tokens = 0": (dict(prompt=[5], max_tokens=0), "max_tokens is 0", "max_tokens"),
    "negative max_tokens": (dict(prompt=[5], max_tokens=-5), "max_tokens is -5", "max_tokens"),
    "huge min_tokens": (dict(prompt=[5], min_tokens=10**30, max_tokens=16), "min_tokens", "min_tokens"),
    "min above max": (dict(prompt=[5], min_tokens=20), "lower min_tokens", "min_tokens"),
    "temperature": (dict(prompt=[5], temperature=-0.1), "temperature is -0.1", "temperature"),
    "infinite": (dict(prompt=[5], temperature=float("inf")), "NaN and Infinity are no JSON numbers", None),
    "NaN": (dict(prompt=[5], top_p=float("nan")), "NaN and Infinity are no JSON numbers", None),
    "top_p": (dict(prompt=[5], top_p=0), "top_p is 0", "top_p"),
    "huge top_k": (dict(prompt=[5], top_k=2**70), "top_k", "top_k"),
    "min_p": (dict(prompt=[5], min_p=2), "min_p is 2", "min_p"),
    "penalty": (dict(prompt=[5], repetition_penalty=0), "repetition_penalty is 0", "repetition_penalty"),
    "negative seed": (dict(prompt=[5], seed=-(2**63) - 1), "seed is -9223372036854775809", "seed"),
    "seed": (dict(prompt=[5], seed=2**64), "seed is", "seed"),
    "empty stop": (dict(prompt=[5], stop=[""]), "stop is ['']", "stop"),
    "stop of numbers": (dict(prompt=[5], stop=[5]), "stop", "stop"),
    "many stops": (dict(prompt=[5], stop=["a"] * 65), "stop holds 65 strings", "stop"),
    "long stop": (dict(prompt=[5], stop="a" * 2000), "of 2000 characters", "stop"),
    "banned ids": (
        dict(prompt=[5], min_tokens=1, stop_token_ids=list(range(5, 150))), "bans", "min_tokens",
    ),
    "stop ids": (dict(prompt=[5], stop_token_ids=[-1]), "stop_token_ids", "stop_token_ids"),
    "logprobs": (dict(prompt=[5], logprobs=21), "logprobs is 21", "logprobs"),
    "logprobs beside echo": (dict(prompt=[5], echo=True, logprobs=21), "logprobs is 21", "logprobs"),
    "prompt_logprobs": (dict(prompt=[5], prompt_logprobs=21), "prompt_logprobs is 21", "prompt_logprobs"),
    "streamed prompt_logprobs": (
        dict(prompt=[5], prompt_logprobs=0, stream=True), "prompt_logprobs is not supported with stream=true",
        "prompt_logprobs",
    ),
    "nothing at all": (dict(prompt=[5], max_tokens=0), "max_tokens is 0 and echo is not true", "max_tokens"),
    "nothing, but some": (
        dict(prompt=[5], max_tokens=0, min_tokens=1, echo=True), "max_tokens is 0 and min_tokens is 1", "max_tokens",
    ),
    "best_of": (dict(prompt=[5], best_of=3), "best_of is 3 and n is 1", "best_of"),
    "options": (dict(prompt=[5], stream_options={}), "stream_options needs stream", "stream_options"),
    "bad options": (dict(prompt=[5], stream=True, stream_options={"include_use": True}), "did you mean", "include_use"),
    "presence": (dict(prompt=[5], presence_penalty=2.5), "presence_penalty is 2.5, it must be a", "presence_penalty"),
    "frequency": (dict(prompt=[5], frequency_penalty=-3), "in [-2, 2]: use 0 to turn it off", "frequency_penalty"),
    "penalty is text": (dict(prompt=[5], frequency_penalty="1"), "frequency_penalty is '1'", "frequency_penalty"),
    "bias": (dict(prompt=[5], logit_bias={"x": 1}), "logit_bias is {'x': 1.0}, it must be a dict", "logit_bias"),
    "bias is text": (dict(prompt=[5], logit_bias={"5": "1"}), "logit_bias.5 is '1'", "logit_bias"),
    "unknown bias": (dict(prompt=[5], logit_bias={"160": 1}), "logit_bias has [160] outside", "logit_bias"),
    "many biases": (
        dict(prompt=[5], logit_bias={str(i): 1 for i in range(1025)}), "1025 token ids, 1024 are possible", "logit_bias"
    ),
    "none allowed": (dict(prompt=[5], allowed_token_ids=[]), "allowed_token_ids is empty", "allowed_token_ids"),
    "unknown allowed": (dict(prompt=[5], allowed_token_ids=[160]), "has [160] outside", "allowed_token_ids"),
    "allowed is text": (dict(prompt=[5], allowed_token_ids=["5"]), "allowed_token_ids.0 is '5'", "allowed_token_ids"),
    "all forbidden": (
        dict(prompt=[5], allowed_token_ids=[4], bad_words=["w4"]), "leave no token to begin with", "allowed_token_ids",
    ),
    "forbidden later": (
        dict(prompt=[5], allowed_token_ids=[4], bad_words=["w4 w4"]), "no token is left", "allowed_token_ids",
    ),
    "bad words": (dict(prompt=[5], bad_words="w4"), "bad_words is 'w4'", "bad_words"),
    "blank word": (dict(prompt=[5], bad_words=["w4", " "]), "none of them blank", "bad_words"),
    "many words": (dict(prompt=[5], bad_words=["w4"] * 1025), "at most 1024 items", "bad_words"),
    "much text": (dict(prompt=[5], bad_words=["w" * 65_537]), "has 65537 characters, 65536 are", "bad_words"),
    "long words": (dict(prompt=[5], bad_words=["w1 " * 2049]), "2049 in all, 2048 are possible", "bad_words"),
    "suffix": (dict(prompt=[5], suffix="x"), "suffix='x' is not supported", "suffix"),
    "priority": (dict(prompt=[5], priority=1), "first come, first served", "priority"),
    "salt": (dict(prompt=[5], cache_salt="x"), "cache_salt='x' is not supported", "cache_salt"),
    "request id": (dict(prompt=[5], request_id="x" * 300), "request_id", "request_id"),
    "usage": (
        dict(prompt=[5], stream=True, stream_options={"continuous_usage_stats": True}), "use include_usage",
        "stream_options",
    ),
    "typo": (dict(prompt=[5], temprature=1), "did you mean 'temperature'?", "temprature"),
    "odd name": (dict(prompt=[5], **{"\ud800": 1}), "no valid JSON", None),
    "odd text": (dict(prompt="\ud83d"), "no valid JSON", None),
}  # fmt: skip
CHAT_REFUSED = {
    "no messages": (dict(), "messages is missing", "messages"),
    "empty": (dict(messages=[]), "messages is empty", "messages"),
    "text": (dict(messages="hello"), "messages is 'hello'", "messages"),
    "no role": (dict(messages=[{"content": "w1"}]), "messages[0] has no role", "messages"),
    "message of text": (dict(messages=["hello"]), "messages.0 is 'hello'", "messages"),
    "no content": (dict(messages=[{"role": "user"}]), "messages[0].content is None", "messages"),
    "image": (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only text is", "messages"),
    "refused by the template": (dict(messages=[{"role": "nobody", "content": ""}]), "no such role", "messages"),
    "tools": (
        dict(messages=[{"role": "user", "content": "w1"}], tools=[{}]), "tools[0] is {}: only functions are tools",
        "tools",
    ),
    "tool choice": (
        dict(messages=[{"role": "user", "content": "w1"}], tool_choice="required"), "but there are no tools",
        "tool_choice",
    ),
    "tool calls": (
        dict(messages=[{"role": "assistant", "tool_calls": [{}]}]), "tool_calls[0] is {}", "messages",
    ),
    "format": (
        dict(messages=[{"role": "user", "content": "w1"}], response_format={"type": "xml"}),
        "response_format is {'type': 'xml'}: give", "response_format",
    ),
    "top_logprobs": (
        dict(messages=[{"role": "user", "content": "w1"}], top_logprobs=2), "needs logprobs=true", "top_logprobs",
    ),
    "two limits": (
        dict(messages=[{"role": "user", "content": "w1"}], max_tokens=2, max_completion_tokens=3),
        "give one of them", "max_tokens",
    ),
    "template": (
        dict(messages=[{"role": "user", "content": "w1"}], chat_template_kwargs={"tokenize": False}),
        "may not set 'tokenize'", "chat_template_kwargs",
    ),
}  # fmt: skip
BODIES = {
    "empty": b"",
    "no JSON": b"{'prompt': 3}",
    "a list": b"[1]",
    "cut": b'{"prompt": [5',
    "no UTF-8": b'{"prompt": "\xff"}',
    "nested": b"[" * 100_000,
    "a number of 10,000 digits": b'{"seed": ' + b"9" * 10_000 + b"}",
    "10 MB of junk": b"\x00junk" * 2_000_000,
    "10 MB of text": b'{"prompt": "' + b"w" * 10_000_000 + b'", "n": -1}',
}


def test_nonsense_is_refused_by_name_and_harms_nobody(path):
    async def ask():
        async with serving(path, app_options=dict(strict=True)) as served:
            wanted = await served.complete([40, 41], **LONG)
            staying = asyncio.create_task(served.complete([40, 41], **LONG))
            cases = [("/v1/completions", *case) for case in REFUSED.items()]
            cases += [(CHAT, *case) for case in CHAT_REFUSED.items()]
            for url, name, (body, message, param) in cases:
                content = json.dumps({"model": MODEL, **body})
                response = await served.client.post(url, content=content)
                assert response.status_code == 400, f"{name}: {response.status_code} {response.text}"
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 1000
                assert message in error["message"], f"{name}: {error}"
                assert error["param"] == param and error["type"] == "invalid_request_error", f"{name}: {error}"
            for name, content in BODIES.items():
                for url in ("/v1/completions", CHAT):
                    response = await served.client.post(url, content=content)
                    assert response.status_code == 400 and response.json()["error"]["message"], name
            response = await served.client.post("/v1/completions", content=b" " * (32 * 2**20 + 1))
            assert response.status_code == 413
            assert (await staying)["choices"] == wanted["choices"]
            await served.wait_until_idle()

    asyncio.run(ask())


def test_fields_that_stock_clients_send_are_accepted(path):
    harmless = dict(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", presence_penalty=0, frequency_penalty=0.0,
        logit_bias=None, allowed_token_ids=None, bad_words=[], best_of=1, suffix=None, temperature=None, seed=-1,
        logprobs=None, request_id="mine",
        priority=0, cache_salt=None, skip_special_tokens=True, tool_choice="auto",
    )  # fmt: skip
    chat = dict(
        tools=None, tool_choice="none", response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True
    )

    async def ask():
        async with serving(path) as served:
            response = await served.post(prompt="w5", **harmless)
            assert response.status_code == 200 and response.json()["id"] == "cmpl-mine", response.text
            options = dict(stream=True, stream_options=dict(include_usage=True, continuous_usage_stats=False))
            assert (await served.post(prompt="w5", **options)).status_code == 200
            del harmless["best_of"], harmless["suffix"], harmless["tool_choice"]
            asked = dict(messages=[{"role": "user", "content": "w1", "name": None}], max_tokens=2, **harmless, **chat)
            response = await served.post(CHAT, **asked)
            assert response.status_code == 200, response.text

    asyncio.run(ask())


def error_of(response):
    return response.json()["error"]["message"]


def test_unknown_models_and_paths_are_not_found(path):
    async def ask():
        async with serving(path) as served:
            response = await served.post(prompt="w5", model="gpt")
            error = response.json()["error"]
            assert response.status_code == 404 and error["code"] == "model_not_found" and "'tiny'" in error["message"]
            for method, url, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
                response = await served.client.request(method, url)
                assert response.status_code == status and url in response.json()["error"]["message"]
            assert response.headers["allow"] == "POST" and error_of(response).endswith("Method Not Allowed: use POST")
            for url, near in (
                ("/chat/completions", "/v1/chat/completions"),
                ("/v1/v1/chat/completions", "/v1/chat/completions"),
                ("/api/generate", "/v1/completions"),
                ("/v1/chat/completion", "/v1/chat/completions"),
            ):
                said = error_of(await served.client.post(url))
                assert said.startswith(f"there is no path {url} (did you mean {near}?): there are /detokenize, /docs, ")
            assert set(PATHS.values()) <= set(said.partition("there are ")[2].split(", "))
            for url, why in (
                ("/v1/embeddings", "models here generate text: start a server with a model of that kind"),
                ("/api/pull/", "the server has the model that it was started with"),
            ):
                assert error_of(await served.client.post(url)).startswith(
                    f"there is no path {url.rstrip('/')}, as {why}"
                )
            assert "zzz: there are /detok" in error_of(await served.client.get("/zzz"))
            assert error_of(await served.client.get("/health//")).startswith("there is no path /health/ ")
            samples = await metrics_of(served)
            assert samples["nanoinfer:http_responses_total other 404"] == 9
            assert samples["nanoinfer:http_responses_total /v1/completions 404"] == 1

    asyncio.run(ask())


# Name: path, body, what is at fault. The model length is 384, the pool holds 112 tokens.
LONG_MESSAGES = [{"role": "user", "content": "w5 " * 400}]
FOR_THE_POOL = [{"role": "user", "content": "w5 " * 120}]
TOO_LONG = {
    "prompt": ("/v1/completions", dict(prompt=[5] * 400), "max_model_len=384", "prompt"),
    "second prompt": ("/v1/completions", dict(prompt=[[5], [5] * 400]), "max_model_len=384", "prompt"),
    "text": ("/v1/completions", dict(prompt="w5 " * 400), "max_model_len=384", "prompt"),
    "messages": (CHAT, dict(messages=LONG_MESSAGES), "max_model_len=384", "messages"),
    "with output": ("/v1/completions", dict(prompt=[5] * 300, max_tokens=85), "max_model_len = 384", "max_tokens"),
    "pool": ("/v1/completions", dict(prompt=[5] * 120), "KV cache holds 112", "prompt"),
    "pool, with output": ("/v1/completions", dict(prompt=[5] * 100, max_tokens=28), "KV cache holds 112", "max_tokens"),
    "pool, chat": (CHAT, dict(messages=FOR_THE_POOL), "KV cache holds 112", "messages"),
}  # fmt: skip


def test_what_does_not_fit_is_refused_with_openais_code_and_a_chats_limit_is_cut(path, caplog):
    async def ask():
        async with serving(path) as served:
            served.engine.modes.max_sequence_tokens = lambda mode: 112
            for name, (url, body, message, param) in TOO_LONG.items():
                response = await served.post(url, **body)
                error = response.json()["error"]
                assert response.status_code == 400 and message in error["message"], f"{name}: {error}"
                assert (error["param"], error["code"]) == (param, "context_length_exceeded"), f"{name}: {error}"
            assert (await served.post(prompt=[5] * 100, max_tokens=5)).status_code == 200
            answer = await served.post(CHAT, messages=[{"role": "user", "content": "w5"}], temperature=0)
            assert answer.json()["usage"]["total_tokens"] == 112, "a chat without a limit takes what the pool has"
            with caplog.at_level("WARNING"):
                for limit in (120, 1_000_000, -1):
                    answer = await served.post(
                        CHAT, messages=[{"role": "user", "content": "w5"}], temperature=0, max_tokens=limit
                    )
                    assert answer.json()["usage"]["total_tokens"] == 112, "as one with a limit that is too large"
            notes = [one.message for one in caplog.records if "a chat gets what there is room for" in one.message]
            assert len(notes) == 1 and "max_tokens is 1000000, together they may be max_model_len = 384" in notes[0]
            answer = await served.post(prompt=[5] * 100, max_tokens=-1, temperature=0, ignore_eos=True)
            assert answer.json()["usage"]["total_tokens"] == 112, "-1 is as many as there is room for"
        async with serving(path, app_options=dict(strict=True)) as served:
            answer = await served.post(CHAT, messages=[{"role": "user", "content": "w5"}], max_tokens=1_000_000)
            assert answer.status_code == 400 and "lower max_tokens" in answer.json()["error"]["message"]

    asyncio.run(ask())


# Crowds


def test_too_many_waiting_requests_are_told_to_come_back(path):
    async def ask():
        async with serving(path, max_num_seqs=2, max_queue=3) as served:
            responses = await asyncio.gather(*(served.post(prompt=[5 + i], **LONG) for i in range(12)))
            refused = [response for response in responses if response.status_code == 429]
            assert len(refused) == 12 - 2 - 3, "two run and three wait"
            for response in refused:
                assert response.headers["retry-after"] == "1"
                assert "of 3 sequences wait" in response.json()["error"]["message"]
            assert sum(response.status_code == 200 for response in responses) == 5
            await served.wait_until_idle()
            assert (await served.post(prompt=[5], max_tokens=2)).status_code == 200

    asyncio.run(ask())


def test_prompts_beyond_the_queue_are_told_to_come_back_or_that_they_never_fit(path):
    """One runs and two may wait."""

    async def ask():
        async with serving(path, max_num_seqs=1, max_queue=2) as served:
            for body in (dict(prompt=[[5]] * 100), dict(prompt=[5], n=4), dict(prompt=[[5], [6]], n=2)):
                response = await served.post(**body)
                assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
                assert "send at most 3 in one request" in response.json()["error"]["message"]
                assert "--max-queue" in response.json()["error"]["message"]
            assert (await served.post(prompt=[[5], [6], [7]], max_tokens=2)).status_code == 200
            running = asyncio.create_task(served.complete([40], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 10)
            for body in (dict(prompt=[[5]] * 3), dict(prompt=[5], n=3)):
                response = await served.post(**body)
                assert response.status_code == 429 and response.headers["retry-after"] == "1"
                said = response.json()["error"]["message"]
                assert said.startswith("the queue has no room: 0 of 2 sequences wait, the request has 3: try again")
            assert (await served.post(prompt=[[5], [6]], max_tokens=2)).status_code == 200
            await running
            await served.wait_until_idle()

    asyncio.run(ask())


def test_prompts_of_one_request_are_queued_together_or_not_at_all(path):
    async def ask():
        async with serving(path) as served:
            # The second prompt fits into max_model_len but has too little room in the pool.
            served.engine.modes.max_sequence_tokens = lambda mode: 32
            response = await served.post(prompt=[[5], [6] * 30], max_tokens=20)
            assert response.status_code == 400
            stats = await served.wait_until_idle()
            assert stats["num_prefill_tokens"] == 0

    asyncio.run(ask())


def test_a_crowd_gets_what_each_gets_alone(path):
    async def ask():
        async with serving(path) as served:
            bodies = [
                dict(prompt=[5 + i] * (1 + i % 7), max_tokens=4 + i % 9, temperature=i % 2, seed=i, ignore_eos=True)
                for i in range(24)
            ]
            wanted = [(await served.post(**body)).json()["choices"] for body in bodies]

            async def ask_one(i):
                response = await served.post(**bodies[i], stream=bool(i % 3))
                if i % 3 == 0:
                    return response.json()["choices"]
                parts = [part["choices"][0] for part in events(response.text)]
                return [{**wanted[i][0], "text": "".join(part["text"] for part in parts)}]

            assert await asyncio.gather(*map(ask_one, range(24))) == wanted
            await served.wait_until_idle()

    asyncio.run(ask())


# Metrics


def test_metrics_say_what_has_happened(path):
    async def ask():
        async with serving(path) as served:
            await served.complete([[20, 21], [22]], n=2, max_tokens=5)
            await served.post(prompt=[1] * 500)
            text = (await served.client.get("/metrics")).headers["content-type"]
            return text, await metrics_of(served), (await served.async_engine.stats())["gpu_blocks_total"]

    content_type, samples, num_blocks = asyncio.run(ask())
    assert content_type.startswith("text/plain")
    wanted = {
        "nanoinfer:num_requests_running": 0,
        "nanoinfer:num_requests_waiting": 0,
        "nanoinfer:gpu_kv_blocks_used": 0,
        "nanoinfer:gpu_kv_blocks_total": num_blocks,
        "nanoinfer:host_kv_blocks_used": 0,
        "nanoinfer:kv_cache_usage_perc": 0,
        "nanoinfer:num_preemptions_total": 0,
        "nanoinfer:streamed_bytes_total": 0,
        "nanoinfer:graph_bytes": 0,
        "nanoinfer:prefix_cache_queries_total": 6,
        "nanoinfer:prefix_cache_hits_total": 0,
        "nanoinfer:prefill_graph_steps_total": 0,
        "nanoinfer:prompt_tokens_total": 3,
        "nanoinfer:generation_tokens_total": 20,
        "nanoinfer:request_success_total length": 4,
        "nanoinfer:http_responses_total /v1/completions 200": 1,
        "nanoinfer:http_responses_total /v1/completions 400": 1,
        "nanoinfer:time_to_first_token_seconds_count": 2,
        "nanoinfer:time_per_output_token_seconds_count": 2,
        "nanoinfer:e2e_request_latency_seconds_count": 2,
    }
    assert {name: samples.get(name) for name in wanted} == wanted
    assert samples["nanoinfer:prefill_eager_steps_total"] >= 1
    first, total = (samples[f"nanoinfer:{name}_seconds_sum"] for name in ("time_to_first_token", "e2e_request_latency"))
    assert 0 < first < total


def test_a_short_prompt_does_not_wait_for_a_long_one(path, monkeypatch):
    encode, may_go_on = tokenizing.encode_within, threading.Event()

    def slow(tokenizer, text, *arguments, **how):
        assert len(text) < 100_000 or may_go_on.wait(30)
        return encode(tokenizer, text, *arguments, **how)

    monkeypatch.setattr(tokenizing, "encode_within", slow)

    async def ask():
        async with serving(path) as served:
            long = asyncio.create_task(served.post(prompt="w5 " * 50_000))
            await asyncio.sleep(0.05)
            assert (await served.complete("w20", max_tokens=2))["usage"]["completion_tokens"] == 2
            assert (await served.client.get("/health")).status_code == 200 and not long.done()
            may_go_on.set()
            assert (
                "the prompt is too long: at least 6667 tokens in 20000 of its"
                in (await long).json()["error"]["message"]
            )

    asyncio.run(ask())
