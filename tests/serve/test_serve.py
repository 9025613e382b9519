"""The HTTP application in this process: answers, streams and what clients may ask for."""

import asyncio

import pytest
from engines import COMMON
from serving import MODEL, events, make_served_checkpoint, serving

from nanoinfer import LLM, SamplingParams

GREEDY = dict(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False))) as llm:
        yield llm


def generated(llm, prompts, **params):
    return [output.outputs for output in llm.generate(prompts, SamplingParams(**params), use_tqdm=False)]


# Completions

PROMPTS = {
    "text": "w20 w21 w22",
    "texts": ["w20 w21 w22", "w30"],
    "token ids": [20, 21, 22],
    "lists of token ids": [[20, 21, 22], [30], [40, 41]],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_completions_are_those_of_generate(path, llm, prompt):
    params = dict(n=2, max_tokens=9, temperature=1.2, seed=3, top_k=50, top_p=0.9, ignore_eos=True)
    wanted = [completion for outputs in generated(llm, prompt, **params) for completion in outputs]

    async def ask():
        async with serving(path) as served:
            return await served.complete(prompt, return_token_ids=True, **params)

    answer = asyncio.run(ask())
    assert answer["object"] == "text_completion" and answer["model"] == MODEL and answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))
    for choice, completion in zip(answer["choices"], wanted, strict=True):
        assert choice["text"] == completion.text and choice["token_ids"] == completion.token_ids
        assert choice["finish_reason"] == "length"
    num_prompt = {"text": 3, "texts": 4, "token ids": 3, "lists of token ids": 6}
    (count,) = [num_prompt[name] for name in PROMPTS if PROMPTS[name] is prompt]
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["completion_tokens"] == 9 * len(wanted)
    assert answer["usage"]["total_tokens"] == count + 9 * len(wanted)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_stream_joins_to_the_whole_answer(path, logprobs):
    asked = dict(
        prompt=["w20 w21", "w33"], n=2, max_tokens=8, temperature=1.1, seed=1, ignore_eos=True, stop=["w9 w10"],
        return_token_ids=True, logprobs=logprobs,
    )  # fmt: skip

    async def ask():
        async with serving(path) as served:
            whole = await served.post(**asked)
            streamed = await served.post(**asked, stream=True, stream_options={"include_usage": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            return whole.json(), events(streamed.text)

    whole, (*parts, last) = asyncio.run(ask())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in part for part in parts)
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert len(mine) == len(choice["token_ids"]), "one event for each token"
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert sum((part["token_ids"] for part in mine), []) == choice["token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            assert sum((part["logprobs"][name] for part in mine), []) == values
        for token, logprob, top in zip(*(choice["logprobs"][k] for k in ("tokens", "token_logprobs", "top_logprobs"))):
            assert top[token] == logprob and len(top) in (logprobs, logprobs + 1)


def test_stops_seeds_and_penalties_reach_the_sampler(path, llm):
    (free,) = generated(llm, "w20 w21", max_tokens=12, **GREEDY)
    tokens = free[0].token_ids
    stop = f"w{tokens[4]}"
    asked = dict(max_tokens=12, min_tokens=2, stop=[stop, "w5 w6"], repetition_penalty=1.3, min_p=0.1, **GREEDY)
    (wanted,) = generated(llm, "w20 w21", **asked)
    common = dict(max_tokens=12, temperature=0.6, seed=3, ignore_eos=True)
    counted = [common, *(common | one for one in (dict(presence_penalty=2), dict(frequency_penalty=0.5)))]
    counted.append(common | dict(n=2, presence_penalty=-0.5, frequency_penalty=2))
    expected = [[c.token_ids for c in generated(llm, "w20 w21", **one)[0]] for one in counted]
    assert len({tuple(ids) for found in expected for ids in found}) == 5, "a penalty changed nothing"

    async def ask():
        async with serving(path) as served:
            by_id = await served.complete("w20 w21", max_tokens=12, stop_token_ids=[tokens[3]], return_token_ids=True)
            answers = [await served.complete("w20 w21", return_token_ids=True, **one) for one in counted]
            return by_id, await served.complete("w20 w21", **asked), answers

    by_id, full, answers = asyncio.run(ask())
    assert [[choice["token_ids"] for choice in answer["choices"]] for answer in answers] == expected
    assert (by_id["choices"][0]["finish_reason"], by_id["choices"][0]["stop_reason"]) == ("stop", tokens[3])
    assert by_id["choices"][0]["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert full["choices"][0]["text"] == wanted[0].text
    assert full["choices"][0]["stop_reason"] == wanted[0].stop_reason


def test_limits_reach_the_sampler(path, llm):
    """And bad words are read on a thread of the server's, not between two steps."""
    (free,) = generated(llm, "w20 w21", max_tokens=8, **GREEDY)
    tokens = free[0].token_ids
    limits = [
        dict(logit_bias={str(tokens[0]): -100, "7": 2.5}),
        dict(bad_words=[f"w{tokens[1]} w{tokens[2]}"]),
        dict(allowed_token_ids=[3, tokens[0], 90], n=2, temperature=0.7, seed=4),
        dict(logit_bias={"5": 3}, bad_words=[f"w{tokens[0]}"], allowed_token_ids=list(range(0, 160, 2))),
    ]
    common = dict(max_tokens=8, ignore_eos=True, temperature=0)
    wanted = [[c.token_ids for c in generated(llm, "w20 w21", **common | one)[0]] for one in limits]
    assert all([tokens] != one for one in wanted)
    messages = [{"role": "user", "content": "w1"}]
    prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    said = generated(llm, prompt, **common)[0][0].token_ids[0]

    async def ask():
        async with serving(path) as served:
            served.engine.tokenizer.encode = lambda *_, **__: pytest.fail("read on the engine's thread")
            answers = [await served.complete("w20 w21", return_token_ids=True, **common | one) for one in limits]
            asked = dict(messages=messages, return_token_ids=True, bad_words=[f"w{said}"], **common)
            return answers, (await served.post("/v1/chat/completions", **asked)).json()

    answers, talked = asyncio.run(ask())
    assert [[choice["token_ids"] for choice in answer["choices"]] for answer in answers] == wanted
    assert said not in talked["choices"][0]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(path, stream):
    async def ask():
        async with serving(path) as served:
            plain = await served.complete("w20 w21", max_tokens=4)
            response = await served.post(prompt=[20, 21], echo=True, max_tokens=4, stream=stream, **GREEDY)
            choices = events(response.text) if stream else [response.json()]
            return plain["choices"][0]["text"], "".join(part["choices"][0]["text"] for part in choices)

    plain, echoed = asyncio.run(ask())
    assert echoed == "w20 w21" + plain


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(path, llm):
    (wanted,) = generated(llm, [20, 21], max_tokens=5, **GREEDY)

    async def ask():
        async with serving(path, skip_tokenizer_init=True) as served:
            answer = await served.complete([20, 21], max_tokens=5, return_token_ids=True, logprobs=1)
            streamed = await served.post(prompt=[20, 21], max_tokens=5, return_token_ids=True, stream=True, **GREEDY)
            refused = [
                await served.post(prompt="w20"),
                await served.post(prompt=[20], stop="w3"),
                await served.post("/v1/chat/completions", messages=[{"role": "user", "content": "w1"}]),
            ]
            return answer["choices"][0], events(streamed.text), refused

    choice, streamed, refused = asyncio.run(ask())
    assert choice["text"] == "" and choice["token_ids"] == wanted[0].token_ids
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in wanted[0].token_ids]
    assert sum((part["choices"][0]["token_ids"] for part in streamed), []) == wanted[0].token_ids
    for response in refused:
        assert response.status_code == 400 and "there is no tokenizer" in response.json()["error"]["message"]


# Chat


def test_chat_is_that_of_llm_chat(path, llm):
    messages = [{"role": "system", "content": "w30"}, {"role": "user", "content": "w31 w32"}]
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": t} for t in ("w31", "w32")]}]
    (wanted,) = llm.chat(messages, SamplingParams(max_tokens=6, logprobs=2, **GREEDY), use_tqdm=False)
    asked = dict(max_completion_tokens=6, logprobs=True, top_logprobs=2, return_token_ids=True, **GREEDY)

    async def ask():
        async with serving(path) as served:
            whole = [(await served.post("/v1/chat/completions", messages=m, **asked)).json() for m in (messages, parts)]
            streamed = await served.post("/v1/chat/completions", messages=messages, stream=True, **asked)
            return *whole, events(streamed.text)

    whole, from_parts, streamed = asyncio.run(ask())
    (choice,) = whole["choices"]
    assert whole["object"] == "chat.completion" and whole["prompt_token_ids"] == wanted.prompt_token_ids
    assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text}
    assert from_parts["choices"] == whole["choices"], "text parts are joined"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"w{token_id}" for token_id in wanted.outputs[0].token_ids]
    for entry, logprobs in zip(entries, wanted.outputs[0].logprobs, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == [e.logprob for e in list(logprobs.values())[:2]]
        assert entry["bytes"] == list(entry["token"].encode())
    first, *rest = [part["choices"][0] for part in streamed]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert "".join(part["delta"]["content"] for part in rest) == wanted.outputs[0].text
    assert sum((part["logprobs"]["content"] for part in rest), []) == entries
    assert rest[-1]["finish_reason"] == "length" and streamed[0]["object"] == "chat.completion.chunk"


def test_an_assistants_content_may_be_null(path):
    async def ask():
        async with serving(path) as served:
            user = {"role": "user", "content": "w31"}
            asked = dict(max_tokens=2, return_token_ids=True, **GREEDY)
            answers = [
                await served.post(
                    "/v1/chat/completions", messages=[user, {"role": "assistant", **content}, user], **asked
                )
                for content in (dict(content=None), dict(content=""), dict())
            ]
            return [answer.json()["prompt_token_ids"] for answer in answers]

    assert asyncio.run(ask()) == [[7, 31, 8, 7, 31, 9]] * 3


def test_chat_without_max_tokens_may_use_what_is_left_of_max_model_len(path):
    async def ask():
        async with serving(path, max_model_len=48) as served:
            asked = dict(messages=[{"role": "user", "content": "w31 w32"}], **GREEDY)
            loud = dict(chat_template_kwargs={"loud": True})
            return [
                (await served.post("/v1/chat/completions", **asked, **more)).json()["usage"]
                for more in ({}, loud, dict(add_generation_prompt=False))
            ]

    usages = asyncio.run(ask())
    assert [usage["prompt_tokens"] for usage in usages] == [4, 5, 3]
    assert [usage["completion_tokens"] for usage in usages] == [44, 43, 45]


# Models, health, version


def test_models_health_and_version(path):
    async def ask():
        async with serving(path) as served:
            get = served.client.get
            models = (await get("/v1/models")).json()
            assert models["object"] == "list" and [model["id"] for model in models["data"]] == [MODEL, "other"]
            assert models["data"][0]["max_model_len"] == COMMON["max_model_len"]
            assert (await get("/v1/models/other")).json()["id"] == "other"
            assert (await get("/v1/models/none")).status_code == 404
            assert (await served.complete("w20", model="other"))["model"] == "other"
            assert (await get("/version")).json()["version"]
            assert (await get("/health")).status_code == (await get("/ping")).status_code == 200
            assert (await served.client.post("/ping")).status_code == 200
            served.async_engine.begin_shutdown()
            assert (await get("/health")).status_code == (await get("/ping")).status_code == 503

    asyncio.run(ask())


def test_tokens_of_texts_and_conversations_and_back(path):
    async def ask():
        async with serving(path) as served:

            async def post(url, **body):
                response = await served.post(url, **body)
                return response.json() if response.status_code == 200 else (response.status_code, response.json())

            return [
                await post("/tokenize", prompt="w20 w21"),
                await post("/tokenize", prompt="w20 " * 500, add_special_tokens=False, return_token_strs=True),
                await post("/tokenize", messages=[{"role": "user", "content": "w31"}]),
                await post("/tokenize", messages=[{"role": "user", "content": "w31"}], add_generation_prompt=False),
                await post("/detokenize", tokens=[20, 21]),
            ], [
                await post("/tokenize"),
                await post("/tokenize", prompt="w1", messages=[]),
                await post("/tokenize", messages=[{"role": "nobody", "content": "w1"}]),
                await post("/detokenize", tokens=[20, 10**6]),
                await post("/detokenize", tokens=[-1]),
                await post("/detokenize", tokens="w1"),
            ]

    (short, long, chat, bare, text), refused = asyncio.run(ask())
    assert short == {"count": 2, "max_model_len": 384, "tokens": [20, 21], "token_strs": None}
    assert long["count"] == 500 and long["token_strs"] == ["w20"] * 500, "longer than the model takes, and counted"
    assert chat["tokens"] == [7, 31, 9] and bare["tokens"] == [7, 31]
    assert text == {"prompt": "w20 w21"}
    params = ["prompt", "prompt", "messages", "tokens", "tokens", "tokens"]
    assert [(status, error["error"]["param"]) for status, error in refused] == [(400, param) for param in params]


def test_the_api_key_guards_the_api_and_not_the_probes(path):
    async def ask():
        async with serving(path, api_key="secret") as served:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                response = await served.client.get("/v1/models", headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert (await served.client.post("/v1/completions", headers=headers)).status_code == 401
            right = {"Authorization": "Bearer secret"}
            assert (await served.client.get("/v1/models", headers=right)).status_code == 200
            assert (await served.client.get("/health")).status_code == 200

    asyncio.run(ask())
