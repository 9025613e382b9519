"""One server of several: the whole application, which requests reach through a call."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, suppress
from typing import Any

from starlette.types import Message, Scope

from nanoinfer.serve.ray.exchange import Exchange

_ASK_SECONDS = 4.0  # figures come at the end of a step, so not from a replica that hangs


class Replica:
    """Loads the model and answers requests.

    Nothing here imports torch before `__init__`: Ray has said by then how many threads it may use, and for the same
    bits they must be as many as one server's.

    Args:
        options: of `nanoinfer serve`, by name.
        threads: OMP_NUM_THREADS where the replicas were started; None: not set, so torch takes the cores.
        name: in metrics.
    """

    def __init__(self, options: dict[str, Any], threads: str | None, name: str) -> None:
        self._engine, self._logging, self._drains = None, ExitStack(), False
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        from nanoinfer.serve.log import logging_to
        from nanoinfer.serve.settings import settings_of

        settings = settings_of(argparse.Namespace(**options))
        self._name, self._api_key = name, settings.app.api_key
        self._logging.enter_context(logging_to(settings.log_level, settings.log_format))
        self._engine = settings.make_engine()
        self._engine.start()
        self._app = settings.make_app(self._engine)
        gc.collect()
        gc.freeze()  # as for one server

    async def answer(self, scope: Scope, body: bytes, routed: None = None) -> AsyncIterator[list[Message]]:
        """Yield the messages of the answer to a request, as `Exchange.parts` does."""
        async with aclosing(Exchange(self._app, scope, body).parts()) as parts:
            async for messages in parts:
                yield messages

    async def ask(self, path: str) -> tuple[str, int, bytes]:
        """Return the replica's name, and status and body of the answer to GET `path`; 504: none came in time."""
        status, body = 504, b""
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(_ASK_SECONDS),
                aclosing(Exchange(self._app, get_scope(path, self._api_key), b"").parts()) as parts,
            ):
                async for messages in parts:
                    for message in messages:
                        status = message.get("status", status)
                        body += message.get("body", b"")
        return self._name, status, body

    async def check_health(self) -> None:
        """Raise if requests would not be answered: Ray starts another replica then, but for one that ends anyway."""
        if not self._drains:
            self._engine.check_health()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and return when all others have ended. Those that run for longer than these seconds end
        with the error that one server has for them: Ray would kill the replica, and nobody would know why."""
        self._drains = True
        self._engine.begin_shutdown()
        await self._engine.drain(seconds)

    def close(self) -> None:
        """End what still runs, and give back the memory. Blocks."""
        if self._engine is not None:
            self._engine.close()
        self._logging.close()

    __del__ = close  # Ray calls it when the last request has ended


def get_scope(path: str, api_key: str | None = None) -> Scope:
    """Return the scope of a request without a client: GET `path`, with the key that the server asks for."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [] if api_key is None else [(b"x-api-key", api_key.encode())],
    }
