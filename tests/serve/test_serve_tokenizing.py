"""Texts and conversations to token ids and back over HTTP, and what clients may not ask of it."""

import asyncio
import json
import threading

import pytest
from serving import make_served_checkpoint, serving

from nanoinfer.requests.prompts import NO_VARIABLES
from nanoinfer.serve.token_answers import json_bytes

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "w31"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_names_that_are_no_variables_of_the_template_are_refused(path):
    async def ask():
        async with serving(path) as served:
            for url in (CHAT, "/tokenize"):
                for name in sorted(NO_VARIABLES):
                    response = await served.post(url, messages=[USER], chat_template_kwargs={name: 1})
                    assert response.status_code == 400, f"{url} {name}: {response.text}"
                    error = response.json()["error"]
                    assert error["param"] == "chat_template_kwargs" and f"may not set '{name}'" in error["message"]
            # Names of this package's and of Jinja's own are the template's to use.
            names = "variables template_arguments work text num_chars context args kwargs environment loop None".split()
            for name in [*names, "", "a b"]:
                response = await served.post("/tokenize", messages=[USER], chat_template_kwargs={name: 1})
                assert response.status_code == 200 and response.json()["tokens"] == [7, 31, 9], name
            broken = dict(messages=[{"role": "nobody", "content": ""}], chat_template_kwargs={"raise_exception": 1})
            response = await served.post("/tokenize", **broken)
            assert response.status_code == 400 and response.json()["error"]["param"] == "messages"

    asyncio.run(ask())


def test_large_answers_are_whole(path):
    text = "w20 w21 " * 20_000  # more than one piece of each answer

    async def ask():
        async with serving(path) as served:
            answer = await served.post("/tokenize", prompt=text, return_token_strs=True)
            assert answer.headers["content-type"] == "application/json"
            back = await served.post("/detokenize", tokens=answer.json()["tokens"])
            empty = await served.post("/tokenize", prompt="", return_token_strs=True)
            return answer.json(), back.json(), empty.json(), (await served.post("/detokenize", tokens=[])).json()

    tokens, back, empty, no_text = asyncio.run(ask())
    assert tokens["count"] == 40_000 and tokens["max_model_len"] == 384
    assert tokens["tokens"] == [20, 21] * 20_000 and tokens["token_strs"] == ["w20", "w21"] * 20_000
    assert back == {"prompt": text.strip()}
    assert (empty["count"], empty["tokens"], empty["token_strs"]) == (0, [], []) and no_text == {"prompt": ""}


@pytest.mark.parametrize("text", ["", 'w"1\\\n\u2028é漢😀' * 5_000])
def test_json_in_pieces_is_json(text):
    assert json.loads(json_bytes(text)) == text
    assert json.loads(json_bytes(list(text))) == list(text)


def test_a_body_has_at_most_4_mib(path):
    async def ask():
        async with serving(path) as served:
            for url in ("/tokenize", "/detokenize"):
                response = await served.client.post(url, content=b" " * (4 * 2**20 + 1))
                assert response.status_code == 413 and "4194304 bytes" in response.json()["error"]["message"]
                response = await served.client.post(url, content=b" " * 4 * 2**20)
                assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"

    asyncio.run(ask())


def test_the_api_key_guards_the_tokenizer(path):
    async def ask():
        async with serving(path, api_key="secret") as served:
            for url, body in (("/tokenize", dict(prompt="w1")), ("/detokenize", dict(tokens=[1]))):
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    assert (await served.client.post(url, json=body, headers=headers)).status_code == 401
                    assert (await served.client.post(url + "/", json=body, headers=headers)).status_code == 401
                right = {"Authorization": "Bearer secret"}
                assert (await served.client.post(url, json=body, headers=right)).status_code == 200

    asyncio.run(ask())


def test_nothing_is_done_on_the_loop_and_no_prompt_waits_for_tokenize(path):
    async def ask():
        async with serving(path) as served:
            tokenizer, may_go_on, used = served.async_engine.prompts.tokenizer, threading.Event(), []

            def recorded(name):
                inner = getattr(tokenizer, name)

                def call(*args, **kwargs):
                    used.append((name, threading.current_thread().name.removesuffix("_0")))
                    assert "aside" not in used[-1][1] or may_go_on.wait(30)
                    return inner(*args, **kwargs)

                setattr(tokenizer, name, call)

            for name in ("encode", "decode", "convert_ids_to_tokens"):
                recorded(name)
            waiting = [
                asyncio.create_task(served.post("/tokenize", prompt="w5 w6", return_token_strs=True)),
                asyncio.create_task(served.post("/tokenize", prompt="w5 " * 50_000)),
                asyncio.create_task(served.post("/detokenize", tokens=[5, 6])),
            ]
            await served.wait_until(lambda _: used)
            assert (await served.complete("w20", max_tokens=2))["usage"]["prompt_tokens"] == 1
            assert (await served.post(prompt="w5 " * 50_000)).status_code == 400
            echo = await served.complete([[20, 21], [22]], max_tokens=1, echo=True)
            assert [choice["text"][:3] for choice in echo["choices"]] == ["w20", "w22"]
            assert not any(task.done() for task in waiting)
            may_go_on.set()
            answers = [(await task).json() for task in waiting]
            assert answers[0]["token_strs"] == ["w5", "w6"] and answers[2] == {"prompt": "w5 w6"}
            return used

    used = asyncio.run(ask())
    lanes = {thread.removeprefix("nanoinfer-tokenizer-") for _, thread in used}
    assert lanes == {"short", "long", "aside-short", "aside-long"}
    wanted = {"encode": 1, "decode": 1, "convert_ids_to_tokens": 1}
    assert {name: used.count((name, "nanoinfer-tokenizer-aside-short")) for name in wanted} == wanted
    assert used.count(("encode", "nanoinfer-tokenizer-aside-long")) == 1
    assert used.count(("decode", "nanoinfer-tokenizer-short")) == 2, "what is echoed: no token alone, without logprobs"


def test_what_would_be_ignored_is_refused(path):
    async def ask():
        async with serving(path) as served:
            for kind, name, value in (
                (dict(messages=[USER]), "add_special_tokens", True),
                (dict(messages=[USER]), "add_special_tokens", False),
                (dict(prompt="w1"), "add_generation_prompt", True),
                (dict(prompt="w1"), "add_generation_prompt", False),
                (dict(prompt="w1"), "chat_template_kwargs", {}),
                (dict(prompt="w1"), "chat_template_kwargs", {"loud": True}),
            ):
                response = await served.post("/tokenize", **kind, **{name: value})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["param"] == name and f"{name}={value} stands beside {next(iter(kind))}" in error["message"]
                assert (await served.post("/tokenize", **kind, **{name: None})).status_code == 200

    asyncio.run(ask())


def test_parts_of_a_message_are_text_by_their_type_too(path):
    async def ask():
        async with serving(path) as served:
            for kind in ("image_url", "input_audio", "", 1, ["text"], {"text": 1}, False):
                parts = [{"type": "text", "text": "w31"}, {"type": kind, "text": "w32"}]
                for url in (CHAT, "/tokenize"):
                    response = await served.post(url, messages=[{"role": "user", "content": parts}])
                    assert response.status_code == 400, (url, kind)
                    error = response.json()["error"]
                    assert error["param"] == "messages" and "only text is supported" in error["message"]
                    assert ("images are not supported" in error["message"]) == (kind == "image_url")
                    assert ("--images replace" in error["message"]) == (kind in ("image_url", "input_audio"))
            parts = [{"type": "text", "text": "w31"}, {"text": "w32"}, {"type": None, "text": "w33"}]
            response = await served.post("/tokenize", messages=[{"role": "user", "content": parts}])
            assert response.json()["tokens"] == [7, 31, 32, 33, 9]

    asyncio.run(ask())
