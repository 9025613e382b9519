"""What the engine does, for who watches it: its figures once, and as events while they change."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress

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


class Watchers:
    """Hands what the engine publishes to all who watch: it is asked and written out once, however many they are."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self.number = engine, 0
        self._asking: asyncio.Task | None = None  # while somebody watches
        self._newest: Published | None = None
        self._text = ""  # of its figures, as JSON
        self._failure: ApiError | None = None

    async def events(self, seconds: float) -> AsyncIterator[bytes]:
        """Yield an event for each publication, and one after so many seconds without any."""
        self.number += 1
        if self._asking is None:
            self._newest, self._next = None, asyncio.get_running_loop().create_future()
            self._asking = asyncio.create_task(self._ask())
        known = 0
        try:
            while not self._engine.is_draining:
                if self._failure is not None:
                    yield f"event: error\ndata: {self._failure.body().decode()}\n\n".encode()
                    return
                if self._newest is not None and self._newest.number > known:
                    known = self._newest.number
                    yield self._event("figures", self._text)
                    continue
                if not (await asyncio.wait({self._next}, timeout=seconds))[0] and self._newest is not None:
                    yield self._event("waiting", "null")
        finally:
            self.number -= 1
            if not self.number:
                self._asking.cancel()
                self._asking = None

    async def _ask(self) -> None:
        try:
            while True:
                self._newest = await self._engine.figures(self._newest and self._newest.number)
                self._text = json.dumps(self._newest.figures)
                self._tell()
        except ApiError as error:
            self._failure = error
            self._tell()

    def _tell(self) -> None:
        told, self._next = self._next, asyncio.get_running_loop().create_future()
        told.set_result(None)

    def _event(self, name: str, figures: str) -> bytes:
        age, step_seconds = _times(self._engine, self._newest)
        numbers = f'"number": {self._newest.number}, "age": {age}, "step_seconds": {step_seconds}'
        return f'event: {name}\ndata: {{{numbers}, "figures": {figures}}}\n\n'.encode()


def watching_routes(engine: AsyncEngine, seconds: float = _SECONDS) -> list[Route]:
    watchers = Watchers(engine)

    async def once(_: Request) -> Response:
        published = await engine.figures()
        age, step_seconds = _times(engine, published)
        shown = dict(number=published.number, age=age, step_seconds=step_seconds, figures=published.figures)
        return JSONResponse({"declared": DECLARED, "replicas": [{"name": "", "facts": engine.facts, **shown}]})

    async def follow(_: Request) -> Response:
        if watchers.number >= MOST_WATCHERS:
            raise OverloadedError(f"{watchers.number} clients watch this server, which is the most: close some pages")
        await engine.figures()  # raises where there will be none
        return _Events(watchers.events(seconds))

    return [Route("/engine", once), Route("/engine/events", follow)]


def _times(engine: AsyncEngine, published: Published) -> tuple[float, float]:
    return round(time.monotonic() - published.time, 3), round(engine.step_seconds, 3)


class _Events(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mark_event_stream(scope)
        with suppress(ReaderLeft):
            await while_client_stays(receive, self.stream_response(send))
