"""The thin server before the replicas: it reads a request, has a replica answer it, and passes the answer on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.serve.answers import DONE
from nanoinfer.serve.client import error_response, read_body, while_client_stays
from nanoinfer.serve.errors import MESSAGES, ApiError, BadRequestError, UnavailableError
from nanoinfer.serve.gate import check_framing, check_origin, check_request
from nanoinfer.serve.json_body import load
from nanoinfer.serve.ray.digests import CHARS_PER_TOKEN, digests_of, prompt_text
from nanoinfer.serve.ray.fleet import RoutedRequest
from nanoinfer.serve.ray.merged_metrics import merged
from nanoinfer.serve.request_stream import ReaderLeft
from nanoinfer.serve.settings import ServerSettings
from nanoinfer.serve.waiting_bytes import WaitingBytes

logger = logging.getLogger("nanoinfer.serve")
_LARGE_BODY_BYTES = 65_536  # parsing takes about a millisecond
_MOST_SENDS = 3  # of a request that may be what its replicas die of
# What a replica needs to know of a connection; all of it can be sent.
_SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
    "client", "server",
)  # fmt: skip
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MOST_ANSWER = 256  # tokens for which an answer counts: a limit may be far above what comes
_RESPONSES = "/v1/responses"
_WITHOUT_KV = ("/tokenize", "/detokenize", f"{MESSAGES}/count_tokens")
_HEALTH = ("/health", "/ping")
_ENGINE = "/engine"


class LostError(Exception):
    """The replica died, or cannot be reached, before the end of its answer."""


class Replicas(Protocol):
    """How replicas are reached."""

    def answer(self, scope: Scope, body: bytes, routed: RoutedRequest) -> AsyncIterator[list[Message]]:
        """Choose a replica and yield its answer, as `Replica.answer` does; raise LostError."""

    async def ask_all(self, path: str) -> list[tuple[str, int, bytes]]:
        """Return what every replica that answers says to `Replica.ask`; raise LostError if there are none."""


class Relay:
    """An ASGI application without an engine.

    What the server of a replica would refuse by a request's head reaches it without the body, which is not read.

    Attributes:
        is_shutting_down: whether all replicas are: none could answer in the place of one that refuses.
    """

    is_shutting_down = False

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self._replicas, self._body_timeout = replicas, settings.app.body_timeout
        self.waiting = WaitingBytes(settings.max_queue_bytes)
        self._checks: list[Callable[[Scope], ApiError | None]] = [
            check_framing,
            partial(check_origin, allowed=settings.app.allowed_origins),
            partial(check_request, api_key=settings.app.api_key),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removesuffix("/")
        if path.startswith(_ENGINE) and scope["method"] == "GET":
            refusals = (check(scope) for check in self._checks)
            error = next(filter(None, refusals), None) or (None if path == _ENGINE else _no_events())
            await (await self._of_all(path) if error is None else error_response(error, path))(scope, receive, send)
            return
        if path == "/metrics" and scope["method"] == "GET" or path in _HEALTH:
            await (await self._of_all(path))(scope, receive, send)
            return
        with ExitStack() as charge:
            try:
                body = b""
                if not any(check(scope) for check in self._checks):
                    request = Request(scope, receive)
                    body = await read_body(request, self.waiting, charge, timeout=self._body_timeout)
                await while_client_stays(receive, self._answer(scope, body, _Sender(scope["path"], send, charge)))
            except ApiError as error:
                await error_response(error, path)(scope, receive, send)
            except (ClientDisconnect, ReaderLeft):
                pass  # nobody reads any more

    async def _answer(self, scope: Scope, body: bytes, sender: _Sender) -> None:
        """Send a request to a replica and, if that is lost, or says that it is, before the answer began, to another."""
        routed = await _routed(scope, body)
        known = {name: scope[name] for name in _SCOPE if name in scope}
        try:
            for number in range(1, _MOST_SENDS + 1):
                try:
                    async with aclosing(self._replicas.answer(known, body, routed)) as parts:
                        async for messages in parts:
                            if self._may_go_elsewhere(messages, routed):
                                raise LostError(f"it says {messages[-1].get('body', b'')[:200]!r}")
                            await sender.pass_on(messages)
                    return
                except LostError as error:
                    logger.warning("%s: replica %s is lost: %s", scope["path"], routed.replica, error)
                    if routed.replica is not None:
                        routed.refused_by.add(routed.replica)
                    if sender.has_begun or number == _MOST_SENDS:
                        await sender.fail(_lost(number))
                        return
        finally:
            routed.leave()

    def _may_go_elsewhere(self, messages: list[Message], routed: RoutedRequest) -> bool:
        is_refused = any(message.get("status") == UnavailableError.status for message in messages)
        return is_refused and not self.is_shutting_down and routed.replica not in routed.refused_by

    async def _of_all(self, path: str) -> Response:
        try:
            answers = await self._replicas.ask_all(path)
        except LostError as error:
            answers = []
            logger.warning("%s: %s", path, error)
        if path == "/metrics":
            texts = {name: body.decode() for name, status, body in answers if status == 200}
            return Response(merged(texts), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == _ENGINE and (found := [(name, json.loads(body)) for name, status, body in answers if status == 200]):
            replicas = [one | {"name": name} for name, told in sorted(found) for one in told["replicas"]]
            return Response(json.dumps(found[0][1] | {"replicas": replicas}), media_type="application/json")
        for _, status, body in sorted(answers, key=lambda answer: answer[1] != 200):
            return Response(body, status, media_type="application/json" if body else None)
        return error_response(_none_there(), path)


class _Sender:
    """Passes an answer on to the client, or an error in its place or at its end.

    Args:
        path: of the request; errors have the form of its API.
        charge: closed when the answer begins, as the request is not sent again.

    Attributes:
        has_begun: whether the client has got some of the answer. The head and comments of a stream are none.
    """

    def __init__(self, path: str, send: Send, charge: ExitStack) -> None:
        self._path, self._send, self._charge = path, send, charge
        self._head: Message | None = None
        self._refusal: bytearray | None = None  # behind comments: the body of an error, as far as it has come
        self.has_begun = False

    async def pass_on(self, messages: list[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                if self._head is not None:  # it was sent before, with comments
                    self._refusal = bytearray() if _is_stream(self._head) and not _is_stream(message) else None
                    continue
                self._head = message
            elif self._refusal is not None:
                self._refusal += message["body"]
                if message.get("more_body", False):
                    continue
                message = {"type": "http.response.body", "body": _last_event(self._path, bytes(self._refusal))}
            elif not self.has_begun and not (_is_stream(self._head) and _is_comment(message)):
                self.has_begun = True
                self._charge.close()
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        if self._head is None:
            response = error_response(error, self._path)
            await self._send(
                {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            )
            await self._send({"type": "http.response.body", "body": response.body})
        elif _is_stream(self._head):
            await self._send({"type": "http.response.body", "body": _last_event(self._path, error.body(self._path))})
        else:
            raise RuntimeError(str(error))  # behind half an answer: the connection is cut


async def _routed(scope: Scope, body: bytes) -> RoutedRequest:
    """Return what routes a request: nothing, if it computes nothing or cannot be read."""
    if not body or scope["path"].removesuffix("/") in _WITHOUT_KV:
        return RoutedRequest()
    if len(body) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(_read, body)
    return _read(body)


def _read(body: bytes) -> RoutedRequest:
    try:
        value = load(body)
    except (ValueError, RecursionError):
        return RoutedRequest()  # its replica says what is wrong
    text, limit = prompt_text(value), _MOST_ANSWER
    for name in _LIMITS:
        asked = value.get(name) if isinstance(value, dict) else None
        limit = min(limit, asked) if isinstance(asked, int) and asked >= 0 else limit
    return RoutedRequest(digests_of(text), len(text) // CHARS_PER_TOKEN, limit)


def _is_stream(head: Message) -> bool:
    return any(
        bytes(name).lower() == b"content-type" and b"event-stream" in bytes(value) for name, value in head["headers"]
    )


def _is_comment(message: Message) -> bool:
    return message.get("more_body", False) and all(
        not line or line[:1] == b":" for line in message["body"].split(b"\n")
    )


def _last_event(path: str, error: bytes) -> bytes:
    """Return the end of a stream that failed, as the API of this path has it. error: the body of `ApiError`."""
    if path.startswith(MESSAGES):
        return b"event: error\ndata: " + error + b"\n\n"
    if path.startswith(_RESPONSES):
        found = json.loads(error)["error"]
        event = {"type": "error"} | {name: found[name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    return b"data: " + error + b"\n\n" + DONE


def _lost(num_sends: int) -> UnavailableError:
    return UnavailableError(
        f"the replica that answered this was lost, and the request was sent {num_sends} "
        f"{'time' if num_sends == 1 else 'times'}: send it again",
        code="replica_lost",
    )


def _no_events() -> ApiError:
    return BadRequestError("several replicas send no events: ask /engine, which has the figures of each", status=404)


def _none_there() -> UnavailableError:
    return UnavailableError("there is no replica that answers: look into the server's log", code="no_replica")
