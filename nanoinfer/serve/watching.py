"""What the engine does, for who watches it: its figures once, and as events while they change."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanoinfer.engine.figures import DECLARED
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.client import while_client_stays
from nanoinfer.serve.connection import mark_event_stream
from nanoinfer.serve.errors import ApiError, OverloadedError
from nanoinfer.serve.published import Published
from nanoinfer.serve.request_stream import ReaderLeft

MOST_WATCHERS = 64
_SECONDS = 1.0  # between events while no figures come, as in a long step


def watching_routes(engine: AsyncEngine, seconds: float = _SECONDS) -> list[Route]:
    num_watchers = 0

    def shown(published: Published) -> dict[str, Any]:
        return {
            "number": published.number,
            "age": round(time.monotonic() - published.time, 3),
            "step_seconds": round(engine.step_seconds, 3),
            "figures": published.figures,
        }

    async def once(_: Request) -> Response:
        return JSONResponse(
            {
                "declared": DECLARED,
                "replicas": [{"name": "", "facts": engine.facts, **shown(await engine.figures())}],
            }
        )

    async def follow(_: Request) -> Response:
        if num_watchers >= MOST_WATCHERS:
            raise OverloadedError(f"{num_watchers} clients watch this server, which is the most: close some pages")
        return _Events(events(await engine.figures()))

    async def events(published: Published) -> AsyncIterator[bytes]:
        nonlocal num_watchers
        num_watchers += 1
        waiting: asyncio.Future | None = None
        try:
            yield _event("figures", shown(published))
            while not engine.is_draining:
                waiting = waiting or asyncio.ensure_future(engine.figures(published.number))
                if (await asyncio.wait({waiting}, timeout=seconds))[0]:
                    published, waiting = waiting.result(), None
                    yield _event("figures", shown(published))
                else:
                    yield _event("waiting", {**shown(published), "figures": None})
        except ApiError as error:
            yield _event("error", json.loads(error.body()))
        finally:
            num_watchers -= 1
            if waiting is not None:
                waiting.cancel()

    return [Route("/engine", once), Route("/engine/events", follow)]


def _event(name: str, value: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()


class _Events(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mark_event_stream(scope)
        with suppress(ReaderLeft):
            await while_client_stays(receive, self.stream_response(send))
