"""One request to an application that is called, instead of reached through a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("nanoinfer.serve")
JOIN_SECONDS = 0.02  # an answer's parts of so long come as one message: each costs Ray a millisecond or two


class Exchange:
    """A request, and its answer in parts.

    Args:
        scope: as for the application.
        body: the whole body of the request.
        join_seconds: what the answer gains in so long after a part is the next one.
    """

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, join_seconds: float = JOIN_SECONDS) -> None:
        self._app, self._scope, self._body, self._join_seconds = app, scope, body, join_seconds
        self._messages: list[Message] = []
        self._was_read = self._is_whole = False
        self._error: BaseException | None = None
        self._has_part, self._has_ended, self._has_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def parts(self) -> AsyncIterator[list[Message]]:
        """Yield the messages of the answer; the head comes with the first bytes. Who stops reading ends the request.

        Raises:
            Exception: the application failed before the answer's end.
        """
        working = asyncio.create_task(self._app(self._scope, self._receive, self._send))
        working.add_done_callback(self._note_end)
        try:
            while not self._has_ended.is_set() or self._messages:
                await self._has_part.wait()
                self._has_part.clear()
                if self._messages:
                    messages, self._messages = self._messages, []
                    yield joined(messages)
                try:
                    await asyncio.wait_for(self._has_ended.wait(), self._join_seconds)
                except TimeoutError:
                    pass
            if self._error is not None and not self._is_whole:
                raise self._error
        finally:
            self._has_left.set()
            await asyncio.wait({working})

    async def _receive(self) -> Message:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.append(message)
        if message["type"] == "http.response.body":
            self._has_part.set()
            if not message.get("more_body", False):
                self._is_whole = True
                self._has_ended.set()

    def _note_end(self, working: asyncio.Task) -> None:
        self._error = asyncio.CancelledError() if working.cancelled() else working.exception()
        if self._error is not None:
            logger.error("a request failed", exc_info=self._error)
        self._has_ended.set()
        self._has_part.set()


def joined(messages: list[Message]) -> list[Message]:
    """Return the head, if it is among the messages, and one message with all of the body in them."""
    head = [message for message in messages if message["type"] == "http.response.start"]
    parts = [message for message in messages if message["type"] == "http.response.body"]
    body = b"".join(message.get("body", b"") for message in parts)
    more = all(message.get("more_body", False) for message in parts)
    return [*head, {"type": "http.response.body", "body": body, "more_body": more}] if parts else head
