"""A tiny model behind the HTTP application, for the tests of `nanoinfer serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from engines import SMALL, VOCAB, make_engine
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer.serve.app import AppSettings, create_app
from nanoinfer.serve.async_engine import AsyncEngine

MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ 'w7 ' if message.role == 'user' else 'w8 ' }}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w10 w9' if loud else 'w9' }}{% endif %}"
)


def make_served_checkpoint(directory: Path) -> Path:
    """A checkpoint with a chat template and a tokenizer of one word per token: "w17" is token 17."""
    path = make_checkpoint("qwen3", directory, **SMALL)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


class Served:
    """An application in this process, a client of it, and the engine below.

    Args:
        app_options: further fields of `AppSettings`, and `create_app`'s `sleep`.
        limits: further arguments of `AsyncEngine`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_queue: int = 1024,
        api_key: str | None = None,
        app_options: dict | None = None,
        limits: dict | None = None,
        **arguments,
    ) -> None:
        self.engine = None
        arguments = dict(skip_tokenizer_init=False) | arguments

        def make():
            self.engine = make_engine(path, **arguments)
            return self.engine

        self.async_engine = AsyncEngine(make, max_queue=max_queue, **(limits or {}))
        self.async_engine.start()
        names = [MODEL, "other"]
        settings = dict(app_options or {})
        how = {name: settings.pop(name) for name in ("sleep",) if name in settings}
        settings = AppSettings(served_model_names=names, api_key=api_key, **settings)
        self.app = create_app(self.async_engine, settings, **how)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://server", timeout=60,
            headers={"Content-Type": "application/json"},
        )  # fmt: skip

    async def post(self, path: str = "/v1/completions", **body) -> httpx.Response:
        return await self.client.post(path, json={"model": MODEL, **body})

    async def complete(self, prompt, **body) -> dict:
        response = await self.post(prompt=prompt, **(dict(ignore_eos=True, temperature=0) | body))
        assert response.status_code == 200, response.text
        return response.json()

    async def wait_until(self, condition, seconds: float = 10) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition(self):
            assert asyncio.get_running_loop().time() < deadline, "waited in vain"
            await asyncio.sleep(0.002)

    async def wait_until_idle(self) -> dict:
        """The engine's statistics once it has nothing left; fails if it keeps anything."""
        await self.wait_until(lambda served: not served.async_engine.num_streams and not served.engine.live.requests)
        await self.wait_until(lambda served: not served.async_engine.requests.ahead.is_wanted)
        while self.engine.has_work:  # a step that was launched before the abort is read yet
            await asyncio.sleep(0.002)
        stats = await self.async_engine.stats()
        assert stats["num_running"] == stats["num_waiting"] == stats["gpu_blocks_used"] == 0
        assert not self.async_engine.requests.tracked and not self.async_engine.num_streams
        assert self.async_engine.waiting.num_bytes == 0
        return stats


@contextlib.asynccontextmanager
async def serving(path: Path, **arguments) -> AsyncIterator[Served]:
    served = Served(path, **arguments)
    try:
        async with served.client:
            yield served
    finally:
        served.async_engine.close()


def events(body: str) -> list[dict]:
    """The events of a stream; checks that [DONE] is the last."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def metrics_of(served: Served) -> dict[str, float]:
    """Samples by name, or by name and label values."""
    text = (await served.client.get("/metrics")).text
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class LeavingClient:
    """One request straight to the application, by a client that leaves when it is told to.

    is_cut: the end of the body never comes.
    num_read: messages of the answer that the client reads; None: all.
    """

    def __init__(
        self, app, body: dict, path: str = "/v1/completions", *, is_cut: bool = False, num_read: int | None = None
    ) -> None:
        self._is_cut, self._num_read = is_cut, num_read
        self.sent, self._leaves = json.dumps({"model": MODEL, **body}).encode(), asyncio.Event()
        self._was_read = False
        self.messages: list[dict] = []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": ("server", 80), "client": ("client", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._leaves.set()

    async def _receive(self) -> dict:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self.sent, "more_body": self._is_cut}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        if len(self.messages) == self._num_read:
            await asyncio.Event().wait()
        self.messages.append(message)
