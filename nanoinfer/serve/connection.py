"""One TCP connection: uvicorn's, with limits on time, and with answers for clients that have closed their side."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoinfer.serve.descriptors import Connections
from nanoinfer.serve.errors import ApiError, BadRequestError

# Longer than the 5 s after which common clients close an idle connection. If the server closed it first, it might do so
# just when the client sends a request, and that request would fail.
IDLE_SECONDS = 60
_FIRST_PROBE_SECONDS = 0.1
_PROBE_FACTOR = 4


class Connection(H11Protocol):
    """What uvicorn leaves open: it waits for ever for the end of a request's head, for what follows a request that was
    answered before its end, and for a client that does not read. And it takes a client that has closed its sending side
    for one that has left.

    Such a client may still read, or not exist any more; the end of its data looks the same. So while it gets no answer,
    bytes are sent that mean nothing: a second send fails if the first one has reached nobody.

    Args:
        timeout: seconds for a request's head to arrive, and for a client to take a part of its answer.
        connections: how many may be open; who comes beyond them gets 503.
    """

    def __init__(self, *args: Any, timeout: float, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._timeout = timeout
        self._has_ended = False  # the client's data
        self._waiting: asyncio.TimerHandle | None = None  # for a request
        self._unread: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self._all.refuses(len(self.connections)):
            message = "the server has as many connections as it can: close some, or send this again later"
            self._answer(ApiError(message, status=503, code="too_many_connections"))
            self.transport.close()
        else:
            self._limit_wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_wait()

    def eof_received(self) -> bool:
        """Return whether the connection stays open, so that its request can be answered."""
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        # Clients of HTTP/1.0 know no interim answers, so that whether they are there cannot be found out.
        self._has_ended = is_whole and not self._is_idle and self.scope["http_version"] != "1.0"
        if self._has_ended:
            self._probe(_FIRST_PROBE_SECONDS)
        return self._has_ended

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._waiting, self._unread, self._probing):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_ended and self._is_idle:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:  # the rest is dropped
            self._limit_wait()

    def _limit_wait(self) -> None:
        """Have the time run while no request is answered. Bytes that come in do not set it back."""
        if self._is_idle and self._waiting is None:
            self._waiting = self.loop.call_later(self._timeout, self._end_wait)
        elif not self._is_idle and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end_wait(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:  # else nothing was asked, or is to be said
            self._answer(
                BadRequestError(
                    f"the head of the request has not arrived within {self._timeout:g} s: send it faster, or start the "
                    "server with a larger --body-timeout",
                    status=408,
                    code="head_timeout",
                )
            )
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        start = h11.Response(status_code=error.status, headers=headers)
        for event in (start, h11.Data(data=error.body()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def _probe(self, seconds: float) -> None:
        """Send what means nothing, and again after so many seconds, then after longer ones."""
        if self._is_idle or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        elif is_event_stream(self.scope):
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")))  # a comment between two events
        self._probing = self.loop.call_later(seconds, self._probe, _PROBE_FACTOR * seconds)


def mark_event_stream(scope: Scope) -> None:
    """Note that the answer consists of server-sent events, each sent whole."""
    scope.setdefault("state", {})["is_event_stream"] = True


def is_event_stream(scope: Scope) -> bool:
    return scope.get("state", {}).get("is_event_stream", False)


def server_config(
    app: ASGIApp, timeout: float, *, logs_access: bool = False, max_connections: int | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings for the application.

    Args:
        timeout: as for `Connection`.
        max_connections: that may be open at once; None: any number.
        logs_access: have uvicorn log every HTTP answer.
    """
    return uvicorn.Config(
        app,
        http=partial(Connection, timeout=timeout, connections=Connections(max_connections)),
        log_config=None,  # its loggers write where all others do
        log_level="info" if logs_access else "warning",
        access_log=logs_access,
        ws="none",
        lifespan="off",
        timeout_keep_alive=IDLE_SECONDS,
    )
