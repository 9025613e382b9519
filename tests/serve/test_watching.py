"""What the engine does, over HTTP: once and as events, also while a step runs, and only with the key."""

import asyncio
import json

import pytest
from serving import make_served_checkpoint, serving

from nanoinfer.engine.figures import FACTS, PUBLISHED
from nanoinfer.serve import watching


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


class Watcher:
    """Follows the events until it leaves."""

    def __init__(self, app, headers=()):
        self._leaves, self._parts, self.status = asyncio.Event(), asyncio.Queue(), None
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": "/engine/events", "raw_path": b"/engine/events", "root_path": "", "query_string": b"",
            "headers": list(headers), "server": ("server", 80), "client": ("client", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.status = message.get("status", self.status)
        if message.get("body"):
            await self._parts.put(message["body"].decode())

    async def next(self, kind=None):
        """The next event, or the next of a kind."""
        while True:
            name, data = (await asyncio.wait_for(self._parts.get(), 10)).rstrip("\n").split("\n")
            if kind in (None, name.removeprefix("event: ")):
                return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def leave(self):
        self._leaves.set()
        await asyncio.wait_for(self.task, 10)


def test_figures_once_and_as_events(path):
    async def work():
        async with serving(path) as served:
            told = (await served.client.get("/engine")).json()
            (replica,) = told["replicas"]
            assert {one["name"] for one in told["declared"]} == {one.name for one in (*FACTS, *PUBLISHED)}
            assert replica["facts"].keys() == {one.name for one in FACTS}
            assert replica["figures"]["num_generated_tokens"] == 0 and replica["age"] >= 0
            watcher = Watcher(served.app)
            _, first = await watcher.next()
            await served.complete([20, 21], max_tokens=5)
            numbers, generated = [first["number"]], 0
            while generated < 5:
                _, event = await watcher.next("figures")
                numbers.append(event["number"])
                generated = event["figures"]["num_generated_tokens"]
            assert numbers == sorted(set(numbers)) and event["figures"].keys() == first["figures"].keys()
            await watcher.leave()
            # Nobody reads any more, so nothing is made.
            before = (await served.async_engine.figures()).number
            await served.complete([20, 21], max_tokens=30)
            assert served.async_engine.requests.publisher.newest.number == before

    asyncio.run(work())


def test_the_engine_is_asked_once_however_many_watch(path):
    async def work():
        async with serving(path) as served:
            asked, figures = [], served.async_engine.figures

            async def counted(known=None):
                asked.append(known)
                return await figures(known)

            served.async_engine.figures = counted
            watchers = [Watcher(served.app) for _ in range(8)]
            firsts = [(await watcher.next("figures"))[1]["number"] for watcher in watchers]
            await served.complete([20, 21], max_tokens=5)
            seen = [(await watcher.next("figures"))[1] for watcher in watchers]
            assert len({one["number"] for one in seen}) == len(set(firsts)) == 1 and seen[0]["number"] > firsts[0]
            assert [one for one in asked if one is not None] == list(range(firsts[0], firsts[0] + len(asked) - 9)), (
                asked
            )
            for watcher in watchers:
                await watcher.leave()
            again = Watcher(served.app)
            assert (await again.next("figures"))[1]["figures"]["num_generated_tokens"] == 5
            await again.leave()

    asyncio.run(work())


def test_the_age_is_told_while_a_step_runs(path, monkeypatch):
    async def work():
        async with serving(path) as served:
            watcher = Watcher(served.app)
            _, first = await watcher.next()
            step = served.engine.step

            def long_step():
                asyncio.run_coroutine_threadsafe(seen.wait(), loop).result(10)
                return step()

            loop, seen = asyncio.get_running_loop(), asyncio.Event()
            served.engine.step = long_step
            asked = asyncio.create_task(served.complete([20, 21], max_tokens=2))
            while True:
                name, event = await watcher.next("waiting")
                if event["step_seconds"] > 0:
                    break
            assert event["number"] == first["number"] and event["age"] > 0 and event["figures"] is None
            seen.set()
            await asked
            await watcher.leave()

    routes = watching.watching_routes
    monkeypatch.setattr("nanoinfer.serve.app.watching_routes", lambda engine: routes(engine, 0.01))
    asyncio.run(work())


def test_a_key_a_most_and_an_end(path, monkeypatch):
    monkeypatch.setattr(watching, "MOST_WATCHERS", 2)

    async def work():
        async with serving(path, api_key="secret") as served:
            key = [(b"authorization", b"Bearer secret")]
            for url in ("/engine", "/engine/events"):
                assert (await served.client.get(url)).status_code == 401
            watchers = [Watcher(served.app, key) for _ in range(2)]
            for watcher in watchers:
                await watcher.next()
            refused = Watcher(served.app, key)
            await refused.task
            assert refused.status == 429
            await watchers[0].leave()
            again = Watcher(served.app, key)
            await again.next()

            def lost():
                raise SystemExit("the device is lost")

            served.engine.step = lost
            await served.client.post("/v1/completions", json=dict(prompt=[20]), headers={"x-api-key": "secret"})
            name, event = "", {}
            while name != "error":
                name, event = await again.next()
            assert event["error"]["code"] == "engine_dead" and again.status == 200
            await again.task
            late = Watcher(served.app, key)
            await late.task
            assert late.status == 503

    asyncio.run(work())
