"""Replicas on Ray Serve: where sessions go, what happens when replicas die, and answers as one server's, to the bit."""

import asyncio
import collections
import json
import os
import random
import signal

import pytest
from ray_fleet import ENGINE, client_of, local_ray, replica_processes, samples, start, wait_for_replicas
from serving import MODEL, events, make_served_checkpoint, serving

SESSIONS, TURNS = 40, 5
HOW = dict(model=MODEL, max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url():
    with local_ray() as url:
        yield url


def messages_of(session, turn):
    """A conversation up to the turn that is asked: 300 tokens and 40 more with each, 34 characters long, as pieces are
    of text."""
    draw = random.Random(session)
    said = lambda number: (" " * 30).join(f"w{draw.randrange(11, 160)}" for _ in range(number))  # noqa: E731
    messages = [{"role": "user", "content": said(300)}]
    for _ in range(turn):
        messages += [{"role": "assistant", "content": said(20)}, {"role": "user", "content": said(20)}]
    return messages


async def held_sessions(ask):
    """The answers by (session, turn): all sessions at once, their turns in order, after some thought each."""
    answers = {}

    async def hold(session):
        draw = random.Random(session)
        for turn in range(TURNS):
            await asyncio.sleep(draw.random())  # else they would keep their order, and come to the same by chance
            answers[session, turn] = await ask(session, turn)

    await asyncio.gather(*(hold(session) for session in range(SESSIONS)))
    return answers


def asker(client):
    async def ask(session, turn):
        body = HOW | dict(messages=messages_of(session, turn), logprobs=turn == 0)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return ask


@pytest.fixture(scope="module")
def wanted(path):
    """What one server says to all turns."""

    async def run():
        async with serving(path, **ENGINE) as served:
            return await held_sessions(asker(served.client))

    return asyncio.run(run())


def later_turns_that_hit(answers):
    """Those that find at least the blocks of the turn before, of 32 tokens each."""
    found = []
    for (session, turn), answer in answers.items():
        if turn:
            before = answers[session, turn - 1]["usage"]["prompt_tokens"]
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (before - 1) // 32 * 32 - 32)
    assert len(found) == SESSIONS * (TURNS - 1)
    return sum(found) / len(found)


def check_answers(answers, wanted):
    for key, answer in answers.items():
        assert answer["choices"] == wanted[key]["choices"], key


def test_sessions_stay_where_their_kv_is_and_answers_are_one_servers(url, path, wanted):
    start(path)

    async def run():
        async with client_of(url) as client:
            answers = await held_sessions(asker(client))
            return answers, await samples(client, "prompt_tokens_total")

    answers, tokens = asyncio.run(run())
    check_answers(answers, wanted)
    share = later_turns_that_hit(answers)
    print(f"\n{share:.1%} of later turns found their KV; prompt tokens by replica: {sorted(tokens.values())}")
    assert share >= 0.95 and len(tokens) == 2 and min(tokens.values()) > 0.2 * max(tokens.values())


def test_without_prefixes_half_of_the_turns_come_to_the_other_replica(url, path, wanted):
    start(path, "--no-route-by-prefix")

    async def run():
        async with client_of(url) as client:
            return await held_sessions(asker(client))

    answers = asyncio.run(run())
    check_answers(answers, wanted)
    share = later_turns_that_hit(answers)
    print(f"\n{share:.1%} of later turns found their KV")
    assert 0.25 < share < 0.85


class Load:
    """Clients that ask one thing after another, streamed or not, and note how each request ended."""

    def __init__(self, client, wanted, long):
        self.client, self.wanted, self.long = client, wanted, long
        self.outcomes, self.wrong, self.is_over = collections.Counter(), [], False

    async def run(self, number):
        draw = random.Random(number)
        while not self.is_over:
            key, stream = draw.choice(sorted(self.wanted)), draw.random() < 0.5
            body = HOW | dict(prompt=key, stream=stream, max_tokens=self.long)
            try:
                response = await self.client.post("/v1/completions", json=body)
                self.note(key, stream, response)
            except Exception as error:  # no answer
                self.wrong.append(f"{type(error).__name__}: {error}")

    def note(self, key, stream, response):
        if response.status_code == 503 and response.json()["error"]["code"] == "replica_lost":
            self.outcomes["refused"] += 1
        elif response.status_code != 200:
            self.wrong.append(f"{response.status_code}: {response.text[:300]}")
        elif not stream:
            self.check(key, response.json()["choices"][0]["token_ids"], is_whole=True)
        else:
            *parts, last = events(response.text)
            has_failed = "error" in last
            tokens = [
                token for part in [*parts, *([] if has_failed else [last])] for token in part["choices"][0]["token_ids"]
            ]
            self.check(key, tokens, is_whole=not has_failed)
            if has_failed and last["error"]["code"] != "replica_lost":
                self.wrong.append(json.dumps(last))

    def check(self, key, tokens, is_whole):
        right = self.wanted[key]
        self.outcomes["answered" if is_whole else "ended with an error"] += 1
        if tokens != (right if is_whole else right[: len(tokens)]):
            self.wrong.append(f"other tokens for {key[:20]}: {tokens}")


async def served_by(client, prompt):
    response = await client.post("/v1/completions", json=HOW | dict(prompt=prompt))
    assert response.status_code == 200


def test_requests_go_on_when_replicas_die_and_when_one_more_comes(url, path):
    start(path)
    prompts, long, kills = [(" " * 30).join(f"w{30 + n}" for _ in range(200)) for n in range(6)], 24, 10

    async def run():
        async with serving(path, **ENGINE) as served:
            right = {}
            for prompt in prompts:
                answer = await served.complete(prompt, max_tokens=long, return_token_ids=True)
                right[prompt] = answer["choices"][0]["token_ids"]
        async with client_of(url) as client:
            await wait_for_replicas(client, 2)
            load, draw = Load(client, right, long), random.Random(0)
            clients = [asyncio.create_task(load.run(number)) for number in range(4)]
            for _ in range(kills):
                before = load.outcomes["answered"]
                os.kill(draw.choice(replica_processes()).pid, signal.SIGKILL)
                while load.outcomes["answered"] < before + 20:  # the other one goes on
                    await asyncio.sleep(0.05)
                await wait_for_replicas(client, 2)
            await asyncio.to_thread(start, path, "--replicas=3")
            await wait_for_replicas(client, 3)
            before = await samples(client, "generation_tokens_total")
            for number in range(6):  # prompts that nobody holds
                prompt = (" " * 30).join(f"w{50 + number}" for _ in range(200))
                await served_by(client, prompt)
            await asyncio.sleep(1)
            after = await samples(client, "generation_tokens_total")
            load.is_over = True
            await asyncio.gather(*clients)
            return load, [after[name] - before[name] for name in after]

    load, gained = asyncio.run(run())
    print(f"\n{dict(load.outcomes)}; tokens then by replica, with a third one: {gained}")
    assert not load.wrong and load.outcomes["answered"] >= 20 * kills
    assert len(gained) == 3 and min(gained) > 0


def test_a_client_that_leaves_ends_its_request(url, path):
    start(path)

    async def run():
        async with client_of(url) as client:
            await wait_for_replicas(client, 2)
            before = sum((await samples(client, "generation_tokens_total")).values())
            body = HOW | dict(prompt="w20 w21", max_tokens=1000, stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as response:
                parts = response.aiter_bytes()  # held: httpx closes the connection of one that nobody holds
                await anext(parts)
                assert sum((await samples(client, "num_http_requests_open")).values()) == 1
            while sum((await samples(client, "num_http_requests_open")).values()):
                await asyncio.sleep(0.05)
            return sum((await samples(client, "generation_tokens_total")).values()) - before

    assert 0 < asyncio.run(run()) < 950
