"""A request to an application that is called: its answer in parts, and what becomes of it when nobody reads on."""

import asyncio
import json
from contextlib import aclosing

import pytest
from serving import make_served_checkpoint, serving

from nanoinfer.serve.ray.exchange import Exchange
from nanoinfer.serve.ray.replica import get_scope

FOR_EVER = 3600.0
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


def exchange_of(app, join_seconds=FOR_EVER, body=b""):
    return Exchange(app, get_scope("/"), body, join_seconds)


def test_a_whole_answer_is_one_message_with_its_head():
    async def app(scope, receive, send):
        asked = await receive()
        await send(HEAD)
        await send({"type": "http.response.body", "body": asked["body"] * 2})

    async def run():
        return [messages async for messages in exchange_of(app, body=b"ab").parts()]

    assert asyncio.run(run()) == [[HEAD, part(b"abab", more=False)]]


@pytest.mark.parametrize(
    ("join_seconds", "wanted"),
    [
        (FOR_EVER, [[HEAD, part(b"a")], [part(b"bcd", more=False)]]),
        (0.0, [[HEAD, part(b"a")], [part(b"b")], [part(b"c")], [part(b"d", more=False)]]),
    ],
    ids=["joined", "apart"],
)
def test_what_a_stream_gains_meanwhile_is_one_message(join_seconds, wanted):
    async def run():
        taken = asyncio.Semaphore(0)

        async def app(scope, receive, send):
            await send(HEAD)
            await asyncio.sleep(0)  # the head alone is no part
            for number, letter in enumerate((b"a", b"b", b"c", b"d")):
                await send(part(letter, more=number < 3))
                if number == 0 or join_seconds == 0:
                    await taken.acquire()

        found = []
        async for messages in exchange_of(app, join_seconds).parts():
            found.append(messages)
            taken.release()
        return found

    assert asyncio.run(run()) == wanted


def test_who_stops_reading_leaves_and_the_application_has_ended_then():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await send(HEAD)
        await send(part(b"a"))
        seen.append((await receive())["type"])
        await asyncio.sleep(0)
        seen.append("ended")

    async def run():
        async with aclosing(exchange_of(app).parts()) as parts:
            async for _ in parts:
                break

    asyncio.run(run())
    assert seen == ["http.disconnect", "ended"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_application_that_fails_before_the_end_fails_the_reader(is_whole, caplog):
    async def app(scope, receive, send):
        await send(HEAD)
        await send(part(b"a", more=not is_whole))
        raise ValueError("broken")

    async def run():
        found = []
        try:
            async for messages in exchange_of(app).parts():
                found += messages
        except ValueError as error:
            found.append(str(error))
        return found

    assert asyncio.run(run()) == [HEAD, part(b"a", more=not is_whole), *([] if is_whole else ["broken"])]
    assert "a request failed" in caplog.text


def test_an_engine_frees_what_a_reader_leaves_and_answers_as_through_a_connection(tmp_path):
    path = make_served_checkpoint(tmp_path)
    asked = dict(prompt="w20 w21", max_tokens=6, temperature=0, ignore_eos=True)
    scope = get_scope("/v1/completions") | {"method": "POST", "headers": [(b"content-type", b"application/json")]}

    async def run():
        async with serving(path) as served:
            wanted = await served.complete(asked["prompt"], max_tokens=6)
            found = b""
            async for messages in Exchange(served.app, scope, json.dumps(asked).encode()).parts():
                found += messages[-1]["body"]
            long = asked | dict(max_tokens=300, stream=True)
            async with aclosing(Exchange(served.app, scope, json.dumps(long).encode()).parts()) as parts:
                await anext(parts)
                assert served.async_engine.num_streams == 1
            await served.wait_until_idle()
            return wanted["choices"], json.loads(found)["choices"]

    wanted, found = asyncio.run(run())
    assert wanted == found
