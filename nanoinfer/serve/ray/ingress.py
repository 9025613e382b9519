"""What Ray's HTTP proxy calls: `Relay`, which reaches the replicas through a handle of Ray Serve."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.serve.log import logging_to
from nanoinfer.serve.ray.fleet import RoutedRequest
from nanoinfer.serve.ray.relay import LostError, Relay
from nanoinfer.serve.settings import settings_of

_BROADCAST_SECONDS = 5.0


class Ingress:
    """The one deployment that clients reach.

    Args:
        replicas: the handle of the replicas.
        options: of `nanoinfer serve`, by name.
    """

    def __init__(self, replicas: DeploymentHandle, options: dict[str, Any]) -> None:
        settings = settings_of(argparse.Namespace(**options))
        ExitStack().enter_context(logging_to(settings.log_level, settings.log_format))  # until the process ends
        self._relay = Relay(_Called(replicas), settings)

    async def __call__(self, request: Request) -> Response:
        return _Relayed(self._relay)

    async def drain(self, seconds: float) -> None:
        """Note that all replicas shut down. They have these seconds, and what they say then is the answer."""
        self._relay.is_shutting_down = True


class _Relayed(Response):
    """An answer that is made while it is sent."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relay(scope, receive, send)


class _Called:
    """The replicas behind a handle; see `relay.Replicas`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, scope: Scope, body: bytes, routed: RoutedRequest) -> AsyncIterator[list[Message]]:
        answer, has_ended = self._handle.options(method_name="answer", stream=True).remote(scope, body, routed), False
        try:
            async for messages in answer:
                yield messages
            has_ended = True
        except (RayError, RayServeException) as error:
            has_ended = True
            raise LostError(f"{type(error).__name__}: {error}") from error
        finally:
            if not has_ended:
                answer.cancel()

    async def ask_all(self, path: str) -> list[tuple[str, int, bytes]]:
        try:
            asked = self._handle.broadcast("ask", path)
            found = await asked.results_async(timeout_s=_BROADCAST_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise LostError(f"{type(error).__name__}: {error}") from error
        return [answer for answer in found if isinstance(answer, tuple)]
