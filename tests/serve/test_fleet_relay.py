"""The server before the replicas: where it sends a request, what it passes on of the answer, when it sends again."""

import argparse
import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, LeavingClient, events, make_served_checkpoint, serving

from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import add_arguments
from nanoinfer.serve.ray.exchange import Exchange
from nanoinfer.serve.ray.fleet import Fleet
from nanoinfer.serve.ray.merged_metrics import merged
from nanoinfer.serve.ray.relay import LostError, Relay
from nanoinfer.serve.settings import settings_of

ASKED = {"prompt": "long " * 600}
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def settings(*words):
    parser = Parser()
    add_arguments(parser)
    return settings_of(parser.parse_args(["any", *words], argparse.Namespace()))


def head(status=200, headers=()):
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


def whole(body=b"{}", status=200):
    return [head(status), part(body, more=False)]


class Scripted:
    """Replicas "a", "b" and "c"; each call plays the next script: lists of messages, or what is raised."""

    def __init__(self, *scripts, asked=()):
        self.scripts, self.calls, self.closed, self._asked = list(scripts), [], 0, asked
        self.fleet = Fleet()
        self.fleet.keep("abc")

    async def answer(self, scope, body, routed):
        self.calls.append((self.fleet.place(routed), scope, body, routed))
        try:
            for step in self.scripts.pop(0):
                if step is None:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed += 1

    async def ask_all(self, path):
        if isinstance(self._asked, Exception):
            raise self._asked
        return list(self._asked)

    @property
    def chosen(self):
        return [call[0] for call in self.calls]


def asked_of(replicas, path="/v1/completions", *, words=(), method="POST", **how):
    """The answer to one request."""

    async def run():
        transport = httpx.ASGITransport(Relay(replicas, settings(*words)), raise_app_exceptions=False)
        headers = {"Content-Type": "application/json"} | how.pop("headers", {})
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            return await client.request(method, path, **({"json": ASKED} if method == "POST" else {}) | how)

    response = asyncio.run(run())
    assert all(not place.load for place in replicas.fleet.by_load()), "what was answered counts no longer"
    return response


def test_a_request_is_passed_on_whole_with_what_routes_it():
    replicas = Scripted([[head(201, [(b"x-a", b"1")]), part(b"one ")], [part(b"two", more=False)]])
    response = asked_of(replicas, params={"a": "1"})
    assert (response.status_code, response.headers["x-a"], response.text) == (201, "1", "one two")
    ((_, scope, body, routed),) = replicas.calls
    assert json.loads(body) == ASKED and scope["path"] == "/v1/completions" and scope["query_string"] == b"a=1"
    assert (b"content-type", b"application/json") in scope["headers"] and "app" not in scope
    assert (len(routed.digests), routed.prompt_tokens, routed.answer_tokens) == (2, 3001 // 4, 256)
    assert replicas.closed == 1


def test_an_answer_counts_for_its_limit_where_that_is_short():
    limits = ({"max_tokens": 5}, {"max_completion_tokens": 7}, {"max_output_tokens": 9}, {"max_tokens": 9999})
    for limit in (*limits, {"max_tokens": "x"}, {"max_tokens": None}, {"max_tokens": -1}):
        replicas = Scripted([whole()])
        asked_of(replicas, json=ASKED | limit)
        (number,) = limit.values()
        assert replicas.calls[0][3].answer_tokens == (number if number in (5, 7, 9) else 256)


@pytest.mark.parametrize(
    ("path", "content"),
    [("/v1/completions", b"{"), ("/v1/completions", b"[" * 100_000), ("/tokenize", json.dumps(ASKED).encode())],
    ids=["no JSON", "too deep", "no KV"],
)
def test_what_computes_nothing_is_passed_on_and_counts_for_nothing(path, content):
    replicas = Scripted([whole()])
    assert asked_of(replicas, path, content=content, json=None).status_code == 200
    assert replicas.calls[0][2] == content and replicas.calls[0][3].answer_tokens == 0


def test_a_long_body_has_the_digests_of_a_short_ones_rule():
    replicas = Scripted([whole()])
    asked_of(replicas, json={"prompt": "long " * 60_000})
    assert len(replicas.calls[0][3].digests) == 300_001 // 1024


@pytest.mark.parametrize(
    ("words", "headers"),
    [
        (("--api-key", "secret"), {}),
        ((), {"Content-Type": "text/plain", "Sec-Fetch-Mode": "cors"}),
        ((), {"Origin": "http://evil.example"}),
        ((), {"Transfer-Encoding": "chunked", "Content-Length": "1"}),
    ],
    ids=["key", "type", "origin", "lengths"],
)
def test_what_is_refused_by_its_head_is_refused_by_a_replica_which_gets_no_body(words, headers):
    replicas = Scripted([whole(b"no", 400)])
    assert asked_of(replicas, words=words, headers=headers).status_code == 400
    assert replicas.calls[0][2] == b""


def test_a_body_that_is_too_long_reaches_nobody():
    replicas = Scripted()
    response = asked_of(replicas, content=b"x" * (2**25 + 1), json=None)
    assert response.status_code == 413 and not replicas.calls


def test_a_request_whose_replica_dies_is_sent_to_another():
    replicas = Scripted([LostError("died")], [whole(b"answer")])
    response = asked_of(replicas)
    assert response.text == "answer" and len(set(replicas.chosen)) == 2
    assert [call[2] for call in replicas.calls] == [json.dumps(ASKED, separators=(",", ":")).encode()] * 2


def test_comments_of_a_stream_are_no_answer_yet():
    lost = [[head(headers=STREAM), part(b": 64 of 200 prompt tokens read\n\n")], LostError("died")]
    replicas = Scripted(lost, [[head(headers=STREAM), part(b"data: 1\n\n")], [part(b"data: [DONE]\n\n", more=False)]])
    response = asked_of(replicas)
    assert response.text == ": 64 of 200 prompt tokens read\n\ndata: 1\n\ndata: [DONE]\n\n"
    assert len(replicas.calls) == 2


def test_a_stream_that_had_begun_ends_with_an_error():
    replicas = Scripted([[head(headers=STREAM), part(b'data: {"a": 1}\n\n')], LostError("died")])
    first, last = events(asked_of(replicas).text)
    assert first == {"a": 1} and last["error"]["code"] == "replica_lost" and len(replicas.calls) == 1
    assert "was sent 1 time: send it again" in last["error"]["message"]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/v1/responses", {"type": "error", "code": "replica_lost", "param": None}),
    ],
)
def test_a_stream_of_another_api_ends_with_an_error_of_its_form(path, wanted):
    replicas = Scripted([[head(headers=STREAM), part(b"event: a\ndata: {}\n\n")], LostError("died")])
    *_, name, data = asked_of(replicas, path).text.split("\n\n")[-2].split("\n")
    found = json.loads(data.removeprefix("data: "))
    message = found.get("error", found).pop("message")
    assert name == "event: error" and found == wanted and "send it again" in message


@pytest.mark.parametrize(
    ("path", "refusal", "wanted"),
    [
        ("/v1/completions", {"error": {"message": "full", "code": "overloaded"}}, "data: {}\n\ndata: [DONE]\n\n"),
        ("/v1/messages", {"type": "error", "error": {"message": "full"}}, "event: error\ndata: {}\n\n"),
    ],
)
def test_a_stream_of_comments_that_another_replica_refuses_to_go_on_with_ends_with_its_error(path, refusal, wanted):
    comment, body = ": 64 of 200 prompt tokens read\n\n", json.dumps(refusal)
    lost = [[head(headers=STREAM), part(comment.encode())], LostError("died")]
    halves = [[head(429), part(body[:9].encode())], [part(body[9:].encode(), more=False)]]
    assert asked_of(Scripted(lost, halves), path).text == comment + wanted.format(body)


def test_a_refusal_behind_comments_has_the_form_of_a_stream_of_responses():
    lost = [[head(headers=STREAM), part(b": read\n\n")], LostError("died")]
    refusal = {"error": {"message": "full", "type": "overloaded_error", "param": "input", "code": "overloaded"}}
    response = asked_of(Scripted(lost, [whole(json.dumps(refusal).encode(), 429)]), "/v1/responses")
    data = response.text.removeprefix(": read\n\nevent: error\ndata: ")
    assert json.loads(data) == {"type": "error", "code": "overloaded", "message": "full", "param": "input"}


def test_half_of_a_whole_answer_is_cut():
    async def run():
        client = LeavingClient(Relay(Scripted([[head(), part(b"{")], LostError("died")]), settings()), ASKED)
        with pytest.raises(RuntimeError, match="was lost"):
            await client.task
        return client.messages

    assert asyncio.run(run()) == [head(), part(b"{")]


def test_a_request_of_which_replicas_die_is_sent_three_times():
    replicas = Scripted(*[[LostError("died")]] * 4)
    response = asked_of(replicas)
    assert response.status_code == 503 and response.json()["error"]["code"] == "replica_lost"
    assert sorted(replicas.chosen) == ["a", "b", "c"]


def test_a_replica_that_says_that_it_is_dead_is_passed_over_and_heard_where_all_are():
    replicas = Scripted([whole(b"dead", 503)], [whole(b"answer")])
    assert asked_of(replicas).text == "answer" and len(set(replicas.chosen)) == 2
    replicas = Scripted([whole(b"dead", 503)], [whole(b"dead, too", 503)])
    replicas.fleet.keep("a")
    response = asked_of(replicas)
    assert response.status_code == 503 and response.text == "dead, too" and replicas.chosen == ["a", "a"]


def test_while_all_shut_down_what_a_replica_says_is_the_answer():
    replicas = Scripted(*[[whole(b"shutting down", 503)]] * 3)
    relay = Relay(replicas, settings())
    relay.is_shutting_down = True

    async def run():
        transport = httpx.ASGITransport(relay)
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            return await client.post("/v1/completions", json=ASKED)

    response = asyncio.run(run())
    assert (response.status_code, response.text, len(replicas.calls)) == (503, "shutting down", 1)


def test_a_client_that_leaves_ends_its_call():
    async def run():
        replicas = Scripted([[head(headers=STREAM), part(b"data: 1\n\n")], None])
        client = LeavingClient(Relay(replicas, settings()), ASKED)
        while len(client.messages) < 2:
            await asyncio.sleep(0)
        assert replicas.closed == 0
        client.leave()
        await client.task
        return replicas

    replicas = asyncio.run(run())
    assert replicas.closed == 1 and all(not place.load for place in replicas.fleet.by_load())


def test_the_bytes_of_a_request_wait_until_its_answer_begins():
    async def run():
        replicas = Scripted([[head(headers=STREAM), part(b": read\n\n")], None])
        relay = Relay(replicas, settings())
        waiting = LeavingClient(relay, ASKED)
        while len(waiting.messages) < 2:
            await asyncio.sleep(0)
        before = relay.waiting.num_bytes
        waiting.leave()
        await waiting.task
        replicas.scripts.append([[head(headers=STREAM), part(b"data: 1\n\n")], None])
        begun = LeavingClient(relay, ASKED)
        while len(begun.messages) < 2:
            await asyncio.sleep(0)
        found = before, relay.waiting.num_bytes
        begun.leave()
        await begun.task
        return found

    before, after = asyncio.run(run())
    assert before > 3000 and after == 0


def test_a_fleet_is_healthy_where_a_replica_is():
    dead = ("a", 503, b'{"error": 1}')
    assert asked_of(Scripted(asked=[dead, ("b", 200, b"")]), "/health", method="GET").status_code == 200
    response = asked_of(Scripted(asked=[dead]), "/ping/", method="GET")
    assert response.status_code == 503 and response.json() == {"error": 1}
    for nobody in ([], LostError("none")):
        response = asked_of(Scripted(asked=nobody), "/health", method="GET")
        assert response.status_code == 503 and response.json()["error"]["code"] == "no_replica"


def test_metrics_of_all_replicas_have_a_label_each():
    one = "# HELP n:a About a.\n# TYPE n:a gauge\nn:a {}\n# HELP n:b_total B.\n# TYPE n:b_total counter\n"
    one += 'n:b_total{{path="/x"}} 2.0\n'
    asked = [("r1", 200, one.format("1.0").encode()), ("r2", 200, one.format("3.0").encode()), ("r3", 504, b"late")]
    response = asked_of(Scripted(asked=asked), "/metrics", method="GET")
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found == {
        ("n:a", (("replica", "r1"),)): 1.0,
        ("n:a", (("replica", "r2"),)): 3.0,
        ("n:b_total", (("path", "/x"), ("replica", "r1"))): 2.0,
        ("n:b_total", (("path", "/x"), ("replica", "r2"))): 2.0,
    }
    assert response.text.count("# HELP n:a") == 1 and merged({}) == ""


def test_figures_of_all_replicas_stand_in_one_answer_for_who_has_the_key():
    def told(number):
        return json.dumps({"declared": [], "replicas": [{"name": "", "number": number}]}).encode()

    asked, words = [("r2", 200, told(2)), ("r1", 200, told(1)), ("r3", 504, b"late")], ("--api-key", "secret")
    headers = {"Authorization": "Bearer secret"}
    response = asked_of(Scripted(asked=asked), "/engine", words=words, method="GET", headers=headers)
    replicas = [{"name": "r1", "number": 1}, {"name": "r2", "number": 2}]
    assert response.json() == {"declared": [], "replicas": replicas}
    assert asked_of(Scripted(asked=asked), "/engine", words=words, method="GET").status_code == 401
    response = asked_of(Scripted(asked=asked), "/engine/events", words=words, method="GET", headers=headers)
    assert response.status_code == 404 and "ask /engine" in response.json()["error"]["message"]
    assert asked_of(Scripted(asked=[]), "/engine", method="GET").status_code == 503


class Local:
    """Replicas that are applications in this process."""

    def __init__(self, apps):
        self.apps, self.fleet = apps, Fleet()
        self.fleet.keep(apps)

    async def answer(self, scope, body, routed):
        async for messages in Exchange(self.apps[self.fleet.place(routed)], scope, body).parts():
            yield messages


@asynccontextmanager
async def two_servers(path):
    async with serving(path) as one, serving(path) as two:
        relay = Relay(Local({"one": one.app, "two": two.app}), settings())
        transport = httpx.ASGITransport(relay)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            yield client, one


def test_turns_of_sessions_find_their_kv_and_answers_are_those_of_one_server(tmp_path):
    path = make_served_checkpoint(tmp_path)
    how = dict(model=MODEL, max_tokens=4, temperature=0, return_token_ids=True, ignore_eos=True, logprobs=True)

    async def run():
        found = []
        async with two_servers(path) as (client, one):
            for turn in range(3):
                for session in range(4):
                    words = " ".join(f"w{30 + session}" for _ in range(300 + 16 * turn))
                    messages = [{"role": "user", "content": words}]
                    answer = (await client.post("/v1/chat/completions", json=how | {"messages": messages})).json()
                    wanted = (await one.post("/v1/chat/completions", **how | {"messages": messages})).json()
                    found.append((turn, answer["choices"], wanted["choices"], answer["usage"]))
        return found

    for turn, choices, wanted, usage in asyncio.run(run()):
        assert choices == wanted
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 256
