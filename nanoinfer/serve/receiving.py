"""Receive a request: read its body, and do the work before its first token while the client stays connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.queue_limits import MAX_BODY_BYTES, Charge
from nanoinfer.serve.request_stream import StreamClosedError

T = TypeVar("T")
DEFAULT_BODY_SECONDS = 60.0


async def read_body(request: Request, charge: Charge, *, timeout: float, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the request's body.

    Args:
        charge: counts the bytes of the body as they arrive.
        timeout: seconds for the whole body.

    Raises:
        BadRequestError: the body is longer than `max_bytes`, or takes longer than `timeout`.
        OverloadedError: too many bytes wait.
        StreamClosedError: the client has disconnected.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise BadRequestError(
                        f"the body has more than {max_bytes} bytes: send fewer or shorter prompts at once",
                        status=413,
                        closes=True,
                    )
                charge.add(len(part))
                body += part
    except ClientDisconnect as error:
        raise StreamClosedError from error
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
    """Return the result of `work`. Cancel `work` as soon as the client disconnects.

    Raises:
        StreamClosedError: the client has disconnected.
    """
    working = asyncio.create_task(work)
    listener = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait({working, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StreamClosedError
        return working.result()
    finally:
        working.cancel()
        listener.cancel()


async def _client_left(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
