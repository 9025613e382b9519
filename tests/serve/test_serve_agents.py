"""The Responses API and the Messages API on a model, through the official clients."""

import asyncio
import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Literal

import anthropic
import httpx
import httpx2
import openai
import pytest
from pydantic import BaseModel, Field
from serving import MODEL, make_served_checkpoint, serving
from structured import make_structured_checkpoint

from nanoinfer.weights.find import find_model

USER = [{"role": "user", "content": "w31 w32"}]
GREEDY = dict(extra_body=dict(temperature=0, ignore_eos=True))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def clients(path, **arguments):
    async with serving(path, **arguments) as served:
        ours = dict(api_key=arguments.get("api_key") or "none", max_retries=0, timeout=60)
        transports = [library.ASGITransport(served.app, raise_app_exceptions=False) for library in (httpx, httpx2)]
        async with (
            httpx.AsyncClient(transport=transports[0]) as one,
            httpx2.AsyncClient(transport=transports[1]) as two,
        ):
            yield (
                served,
                openai.AsyncOpenAI(base_url="http://server/v1", http_client=one, **ours),
                anthropic.AsyncAnthropic(base_url="http://server", http_client=two, **ours),
            )


async def chat(served, messages=USER, **asked):
    """What /v1/chat/completions says to the same."""
    asked = dict(temperature=0, ignore_eos=True, return_token_ids=True) | asked
    response = await served.post("/v1/chat/completions", messages=messages, **asked)
    assert response.status_code == 200, response.text
    return response.json()


# Responses


@pytest.mark.parametrize("given", ["text", "items", "typed items"])
def test_responses_are_those_of_chats(path, given):
    system = [{"role": "system", "content": "w30"}]
    asked = {
        "text": dict(input="w31 w32", instructions="w30"),
        "items": dict(input=[*system, *USER]),
        "typed items": dict(
            instructions="w30",
            input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w31 w32"}]}],
        ),
    }[given]

    async def ask():
        async with clients(path) as (served, client, _):
            wanted = await chat(served, [*system, *USER], max_tokens=9)
            return wanted, await client.responses.create(model=MODEL, max_output_tokens=9, **asked, **GREEDY)

    wanted, response = asyncio.run(ask())
    assert response.output_text == wanted["choices"][0]["message"]["content"] != ""
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.id.startswith("resp_") and response.object == "response" and response.model == MODEL
    assert response.usage.input_tokens == wanted["usage"]["prompt_tokens"] and response.usage.output_tokens == 9
    assert response.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.store is False and response.previous_response_id is None


def test_a_stream_of_responses_joins_to_the_whole(path):
    async def ask():
        async with clients(path) as (_, client, _):
            asked = dict(model=MODEL, input="w31 w32", max_output_tokens=9, **GREEDY)
            whole = await client.responses.create(**asked)
            raw = [event async for event in await client.responses.create(**asked, stream=True)]
            return whole, raw

    whole, raw = asyncio.run(ask())
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    names = [event.type.removeprefix("response.") for event in raw]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in raw[4:-4])
    assert text == raw[-4].text == raw[-1].response.output_text == whole.output_text
    assert len({event.item_id for event in raw[3:-2]}) == 1 and raw[-1].response.id == raw[0].response.id
    assert raw[-1].response.usage.output_tokens == whole.usage.output_tokens == 9


def test_responses_that_end_by_themselves_are_completed(path, tmp_path):
    async def ask():
        async with clients(path) as (served, _, _):
            tokens = (await chat(served, max_tokens=5))["choices"][0]["token_ids"]
        ending = Path(shutil.copytree(path, tmp_path / "ending"))
        (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[4]}))
        async with clients(ending) as (_, client, _):
            asked = dict(model=MODEL, input="w31 w32", temperature=0)
            async with client.responses.stream(**asked) as stream:
                return await client.responses.create(**asked), await stream.get_final_response()

    whole, streamed = asyncio.run(ask())
    assert whole.status == streamed.status == "completed" and whole.incomplete_details is None
    (item,) = whole.output
    assert item.status == "completed" and item.content[0].text == streamed.output_text != ""
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 5


REFUSED = {
    "previous": (dict(input="w1", previous_response_id="resp_1"), "keeps no answers", "previous_response_id"),
    "background": (dict(input="w1", background=True), "the answer comes with the request", "background"),
    "chat's name": (dict(input="w1", max_tokens=3), "give max_output_tokens", "max_tokens"),
    "chat's field": (dict(input="w1", n=2), "it is a field of /v1/chat/completions", "n"),
    "number": (dict(input=3), "input is 3: give a text or a list of items", "input"),
    "image": (
        dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        "input[0].content[0] has the type 'input_image': images are not supported", "input",
    ),
    "reference": (dict(input=[{"type": "item_reference", "id": "x"}]), "refers to another item", "input"),
    "odd item": (dict(input=[{"type": "computer_call"}]), "input[0] has the type 'computer_call': give mess", "input"),
    "call": (dict(input=[{"type": "function_call", "call_id": "a"}]), "input[0].name is None: give a text", "input"),
    "choice": (dict(input="w1", tool_choice="required"), "but there are no tools", "tool_choice"),
    "template": (dict(input=[{"role": "nobody", "content": "w1"}]), "no such role", "messages"),
    "too long": (dict(input="w1 " * 400), "max_model_len=384", "input"),
    "logprobs": (dict(input="w1", include=["message.output_text.logprobs"]), "is not supported", "include"),
}  # fmt: skip


def test_responses_that_cannot_be_are_refused_with_the_reason(path):
    async def ask():
        async with clients(path) as (served, client, _):
            for name, (body, message, param) in REFUSED.items():
                response = await served.post("/v1/responses", **body)
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert message in error["message"] and error["param"] == param, (name, error)
            with pytest.raises(openai.NotFoundError, match="the server keeps no answers"):
                await client.responses.retrieve("resp_1")
            await served.wait_until_idle()

    asyncio.run(ask())


# Messages


@pytest.mark.parametrize("blocks", [False, True])
def test_messages_are_those_of_chats(path, blocks):
    system, content = "w30", "w31 w32"
    if blocks:
        cached = {"cache_control": {"type": "ephemeral"}}
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"}
        system = [billing, {"type": "text", "text": system, **cached}]
        content = [{"type": "text", "text": text, **cached} for text in content.split()]

    async def ask():
        async with clients(path) as (served, _, client):
            wanted = await chat(served, [{"role": "system", "content": "w30"}, *USER], max_tokens=9)
            messages = [{"role": "user", "content": content}]
            asked = dict(model=MODEL, system=system, messages=messages, max_tokens=9, **GREEDY)
            counted = await client.messages.count_tokens(model=MODEL, system=system, messages=messages)
            async with client.messages.stream(**asked) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_message()
            return wanted, await client.messages.create(**asked), counted, events, final

    wanted, message, counted, events, final = asyncio.run(ask())
    text = wanted["choices"][0]["message"]["content"]
    assert [(block.type, block.text) for block in message.content] == [("text", text)]
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == MODEL
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert counted.input_tokens == message.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == 9 and message.usage.cache_read_input_tokens == 0
    assert (
        [block.text for block in final.content] == [text]
        and final.usage == message.usage
        and final.stop_reason == "max_tokens"
    )
    names = [event.type for event in events if event.type != "text"]  # which the client adds
    assert names[:2] == ["message_start", "content_block_start"] and set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_message_may_be_shorter_than_its_limit(path):
    """Agents name the limit of the largest model that they know."""

    async def ask():
        async with clients(path, max_model_len=48) as (_, _, client):
            asked = dict(model=MODEL, messages=USER, max_tokens=32_000, **GREEDY)
            message = await client.messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="62 tokens > 47 maximum"):
                await client.messages.create(**asked | dict(messages=[{"role": "user", "content": "w1 " * 60}]))
            return message

    message = asyncio.run(ask())
    assert message.stop_reason == "model_context_window_exceeded" and message.usage.output_tokens == 44


def test_a_stop_sequence_is_named(path):
    async def ask():
        async with clients(path) as (served, _, client):
            text = (await chat(served, max_tokens=9))["choices"][0]["message"]["content"]
            word = text.split()[2]
            asked = dict(model=MODEL, messages=USER, max_tokens=9, stop_sequences=["nothing", word], **GREEDY)
            return word, text, await client.messages.create(**asked)

    word, text, message = asyncio.run(ask())
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


def test_errors_on_the_path_of_messages_have_anthropics_form(path):
    async def ask():
        async with clients(path, api_key="secret") as (served, _, client):
            with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as caught:
                await client.messages.create(model=MODEL, messages=USER, max_tokens=0)
            assert (
                caught.value.body["error"]["type"] == "invalid_request_error" and caught.value.body["type"] == "error"
            )
            with pytest.raises(anthropic.NotFoundError, match="is not served here: use 'tiny'"):
                await client.messages.create(model="claude", messages=USER, max_tokens=3)
            with pytest.raises(anthropic.AuthenticationError, match="send the header"):
                await client.with_options(api_key="wrong").messages.create(model=MODEL, messages=USER, max_tokens=1)
            for text in ("w1 " * 400, "w1 " * 100_000):  # agents shorten their history by these words
                with pytest.raises(anthropic.BadRequestError) as caught:
                    asked = dict(model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=3)
                    await client.messages.create(**asked)
                said = caught.value.body["error"]["message"]
                found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", said)
                assert found and int(found[1]) > int(found[2]) == 383, said
            bearer = client.with_options(api_key=None, auth_token="secret")
            assert (await bearer.messages.create(model=MODEL, messages=USER, max_tokens=1)).content
            assert (await served.client.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200
            assert (await served.client.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401
            said = (await served.client.get("/v1/messages", headers={"x-api-key": "secret"})).json()
            assert said["type"] == "error" and "use POST" in said["error"]["message"]

    asyncio.run(ask())


def test_an_error_within_a_stream_has_the_form_of_its_api(path):
    async def ask():
        async with clients(path) as (served, _, client):
            original, calls = served.engine.runner.execute, []

            def broken(*arguments):
                calls.append(1)
                if len(calls) % 6 == 0:
                    raise RuntimeError("out of luck")
                return original(*arguments)

            served.engine.runner.execute = broken
            with pytest.raises(anthropic.APIStatusError, match="out of luck"):
                asked = dict(model=MODEL, messages=USER, max_tokens=50, **GREEDY)
                async for _ in await client.messages.create(**asked, stream=True):
                    pass
            calls.clear()
            response = await served.post(
                "/v1/responses", input="w31", max_output_tokens=50, ignore_eos=True, stream=True
            )
            await served.wait_until_idle()
            return response.text.strip().split("\n\n")[-1]

    last = asyncio.run(ask())
    name, data = last.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed" and event["type"] == "response.failed"
    assert event["response"]["status"] == "failed" and "out of luck" in event["response"]["error"]["message"]


class Weather(BaseModel):
    kind: Literal["sun", "rain"]
    degrees: int = Field(ge=-99, le=99)
    sure: bool


def test_both_apis_give_the_form_that_is_asked_for(tmp_path):
    path = make_structured_checkpoint(tmp_path)

    async def ask():
        async with clients(path) as (served, client, other):
            bias = {str(space): -100 for space in served.engine.tokenizer.convert_tokens_to_ids(["Ġ", "Ċ", "č", "ĉ"])}
            how = dict(model=MODEL, extra_body=dict(temperature=1, seed=3, logit_bias=bias))
            asked = dict(input="a question", max_output_tokens=200, text_format=Weather, **how)
            parsed = await client.responses.parse(**asked)
            async with client.responses.stream(**asked) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
            form = {"type": "json_schema", "schema": Weather.model_json_schema()}
            asked = dict(messages=[{"role": "user", "content": "a question"}], max_tokens=200, **how)
            return parsed, streamed, await other.messages.create(**asked, output_config={"format": form})

    parsed, streamed, message = asyncio.run(ask())
    assert isinstance(parsed.output_parsed, Weather) and streamed.output_parsed == parsed.output_parsed
    assert message.stop_reason == "end_turn" and Weather.model_validate_json(message.content[0].text)


# The packaged model


def test_the_packaged_model_says_what_its_notes_say_in_every_api():
    notes = "Records. The pass key of Mira Holt is 48192. The pass key of Mira Lowell is 70355."
    asked = [{"role": "user", "content": "What is the pass key of Mira Holt?"}]
    form = dict(extra_body=dict(structured_outputs=dict(regex=r"The pass key of Mira Lowell is [0-9]{5}\.")))

    async def ask():
        async with clients(find_model("recall"), max_model_len=512, gpu_memory_limit="256MiB") as (_, one, two):
            short = dict(model=MODEL, temperature=0)
            messages = [{"role": "system", "content": notes}, *asked]
            chat = await one.chat.completions.create(messages=messages, max_tokens=40, **short)
            stream = await one.chat.completions.create(messages=messages, max_tokens=40, stream=True, **short)
            parts = [event.choices[0].delta.content or "" async for event in stream if event.choices]
            formed = await one.chat.completions.create(messages=messages, **short, **form)
            said = await one.responses.create(input=asked, instructions=notes, max_output_tokens=40, **short)
            greedy = dict(extra_body=dict(temperature=0))
            told = await two.messages.create(model=MODEL, system=notes, messages=asked, max_tokens=40, **greedy)
            texts = [chat.choices[0].message.content, "".join(parts), said.output_text, told.content[0].text]
            return texts, formed.choices[0].message.content

    texts, formed = asyncio.run(ask())
    assert len(set(texts)) == 1 and "The pass key of Mira Holt is 48192." in texts[0]
    assert formed == "The pass key of Mira Lowell is 70355."
