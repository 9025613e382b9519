"""The connection with a client: read its request, within limits; work while it stays; answer, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanoinfer.serve.answers import LOOP_WORK, Answer
from nanoinfer.serve.connection import mark_event_stream
from nanoinfer.serve.errors import ApiError, BadRequestError
from nanoinfer.serve.request_stream import ReaderLeft, RequestStream
from nanoinfer.serve.waiting_bytes import MAX_BODY_BYTES, WaitingBytes

T = TypeVar("T")
DEFAULT_BODY_SECONDS = 60.0
Write = Callable[[Callable[[], bytes | None]], Awaitable[bytes | None]]
PING_SECONDS = 15.0  # clients, and proxies before the server, give up what is silent for minutes


def error_response(error: ApiError, path: str) -> Response:
    return Response(error.body(path), error.status, error.headers, "application/json")


async def read_body(
    request: Request, waiting: WaitingBytes, charge: ExitStack, *, timeout: float, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """Return the request's body.

    Args:
        waiting: counts the bytes of the body as they arrive, until `charge` is closed.
        timeout: seconds for the whole body.

    Raises:
        BadRequestError: the body is longer than `max_bytes`, or takes longer than `timeout`.
        OverloadedError: too many bytes wait.
        starlette.requests.ClientDisconnect: the client has disconnected.
    """
    body, num_bytes = bytearray(), 0

    def release() -> None:
        waiting.num_bytes -= num_bytes

    charge.callback(release)
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise BadRequestError(
                        f"the body has more than {max_bytes} bytes: send fewer or shorter prompts at once",
                        status=413,
                        closes=True,
                    )
                waiting.add(len(part))
                num_bytes += len(part)
                body += part
    except TimeoutError as error:
        raise BadRequestError(
            f"the body has not arrived within {timeout:g} s, {len(body)} bytes of it have: send it faster, or start "
            "the server with a larger --body-timeout",
            status=408,
            code="body_timeout",
            closes=True,
        ) from error
    return bytes(body)


async def while_client_stays(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. As soon as the client disconnects, cancel `work` and raise ReaderLeft."""
    working = asyncio.create_task(work)
    listener = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait({working, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ReaderLeft
        return working.result()
    finally:
        working.cancel()
        listener.cancel()


async def _client_left(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(
    stream: RequestStream,
    answer: Answer,
    receive: Receive,
    write: Write,
) -> Response:
    """Wait for the last token and return the whole answer. Raises as `RequestStream.next` and `while_client_stays`.

    write: runs a piece of the work that a large answer takes, not on the event loop.
    """

    async def body() -> bytes:
        outputs = []
        while items := await stream.next():
            outputs += items
        parts = answer.whole(outputs)
        if answer.work(outputs) <= LOOP_WORK:
            return b"".join(parts)
        return b"".join([part async for part in _in_turns(parts, write)])

    try:
        return Response(await while_client_stays(receive, body()), media_type="application/json")
    finally:
        stream.close()


class EventStream(StreamingResponse):
    """Server-sent events: each output is sent as soon as it is known. Outputs that came together share one write.

    Where nothing is sent for `PING_SECONDS` to twice as long, as while a long prompt is read, a ping is.

    Args:
        prompt_tokens: returns how many tokens of the prompts are read, and of how many.
        write: as for `whole_answer`.
        on_sent: called when all is sent, if the client has not left.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        stream: RequestStream,
        answer: Answer,
        prompt_tokens: Callable[[], tuple[int, int]],
        write: Write,
        on_sent: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        events = _events(stream, answer, prompt_tokens, write)
        super().__init__(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._stream, self._on_sent, self._pause = stream, on_sent, sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mark_event_stream(scope)
        nudging = asyncio.create_task(self._nudge())
        try:
            await while_client_stays(receive, self.stream_response(send))
            self._on_sent()
        except ReaderLeft:
            pass  # nobody reads any more
        finally:
            nudging.cancel()
            self._stream.close()

    async def _nudge(self) -> None:
        while True:
            self._stream.nudge()
            await self._pause(PING_SECONDS)


async def _events(
    stream: RequestStream, answer: Answer, prompt_tokens: Callable[[], tuple[int, int]], write: Write
) -> AsyncIterator[bytes]:
    try:
        if first := answer.first_events():
            yield first
        while (outputs := await stream.next()) or not stream.has_ended:
            if answer.work(outputs) > LOOP_WORK:
                async for events in _in_turns(answer.events_in_turns(outputs), write):
                    yield events
            elif events := answer.events(outputs) if outputs else answer.ping(*prompt_tokens()):
                yield events
        yield answer.last_events()
    except ApiError as error:
        yield answer.failure(error)


async def _in_turns(parts: Iterator[bytes], write: Write) -> AsyncIterator[bytes]:
    """Yield parts that are not empty; each is made by `write`, behind those of other answers."""
    while (part := await write(lambda: next(parts, None))) is not None:
        if part:
            yield part
