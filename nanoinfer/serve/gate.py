"""Checks before the application: the API key, the origin of web pages, and the content type; and a count of answers."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.serve.client import error_response
from nanoinfer.serve.errors import ApiError, BadRequestError
from nanoinfer.serve.metrics import ServerMetrics

GUARDED = (
    "/v1",
    "/tokenize",
    "/detokenize",
    "/engine",
)  # prefixes of the paths that need the API key and have JSON bodies
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


def allowed_origins(text: str) -> list[str]:
    """Parse the origins from a JSON list, the value of `--allowed-origins`.

    Raises:
        ValueError: the text is not such a list.
    """
    example = """'["http://localhost:3000"]'"""
    try:
        origins = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--allowed-origins {text} is no JSON ({error}): give a list such as {example}") from error
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ValueError(f"--allowed-origins {text} is no JSON list of texts: give one such as {example}")
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f'--allowed-origins has {origin!r}: an origin is "scheme://host" or "scheme://host:port" in small '
                f'letters and without a path, "*" allows all; give a list such as {example}'
            )
    return origins


class Counting:
    """Counts answers. Plain ASGI, like all classes here: every event of a stream passes through the middleware."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Count by route, not by path: clients can make up any number of paths.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.count_response(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


class WithoutSlash:
    """Takes a path with a slash at its end for the path without. A redirection would cost a round trip, and clients
    that do not follow one take it for an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removesuffix("/")
        if path and not path.startswith("/v1/models/"):  # behind it stands a name, which may be a directory's
            scope["path"] = path
        await self._app(scope, receive, send)


class Gate:
    """Lets the requests pass that `refusal` returns no error for."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], ApiError | None]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error_response(error, scope["path"]))(scope, receive, send)


def check_framing(scope: Scope) -> ApiError | None:
    """Refuse a body with two lengths: a proxy may have gone by the other one, and what lies between is then a request
    that the proxy has not seen (RFC 9112, section 6.1)."""
    headers = Headers(scope=scope)
    if "content-length" not in headers or "transfer-encoding" not in headers:
        return None
    return BadRequestError(
        "the request has the headers Content-Length and Transfer-Encoding: send one of them",
        code="two_lengths",
        closes=True,
    )


def check_origin(scope: Scope, *, allowed: Collection[str]) -> ApiError | None:
    """Refuse what a browser sends for a web page from a foreign origin.

    A web page may send requests to any server that the browser can reach, even to one that listens only on this
    machine. The browser names the page's origin in the header Origin; other clients send no such header.
    """
    headers = Headers(scope=scope)
    for origin in headers.getlist("origin"):
        if "*" not in allowed and origin not in allowed and not _is_same_origin(origin, headers.get("host", "")):
            return BadRequestError(
                f"web pages of the origin {origin[:200]!r} may not use this server: start it with --allowed-origins "
                f"'{json.dumps([origin[:200]])}' if they should",
                status=403,
                code="origin_not_allowed",
            )
    is_without = "origin" not in headers and scope["method"] in ("GET", "HEAD")
    return _check_host(headers, allowed) if is_without and "*" not in allowed else None


def _check_host(headers: Headers, allowed: Collection[str]) -> ApiError | None:
    """Refuse what a page reads from its own origin under a name that may have been made to lead here (DNS rebinding).

    Browsers send no Origin with it. A page that is opened itself (navigation) is read by nobody but who opened it.
    """
    host = headers.get("host", "")
    if headers.get("sec-fetch-site") != "same-origin" or headers.get("sec-fetch-mode") == "navigate":
        return None
    if _is_own_name(f"//{host}") or any(urlsplit(origin).netloc.lower() == host.lower() for origin in allowed):
        return None
    return BadRequestError(
        f"web pages may not read this server under the name {host[:200]!r}: start it with --allowed-origins "
        f"'{json.dumps(['http://' + host[:200]])}' if they should",
        status=403,
        code="host_not_allowed",
    )


def check_request(scope: Scope, *, api_key: str | None, routes: Iterable[BaseRoute] | None = None) -> ApiError | None:
    """Refuse a request to a guarded path without the API key, or with a body of a browser's that is not called JSON.

    routes: a path that is none of them is told so by whoever looks for it; None: all paths are some.
    """
    if not scope["path"].startswith(GUARDED):
        return None
    headers = Headers(scope=scope)
    if api_key is not None:
        split = (one.partition(" ") for one in headers.getlist("authorization"))
        given = [key.strip() for scheme, _, key in split if scheme.lower() == "bearer"] + headers.getlist("x-api-key")
        is_right = [hmac.compare_digest(one.encode("latin-1"), api_key.encode()) for one in given]
        if not any(is_right):
            return BadRequestError(
                "the API key is missing or wrong: send the header Authorization: Bearer KEY, or x-api-key: KEY",
                status=401,
                code="invalid_api_key",
            )
    # A web page may post other content types, or none, to any server without a preflight request. Its browser says
    # where it is from, or how it fetches: old ones the one, new ones the other, too. Other clients name any type, as
    # curl does a form's.
    given = headers.getlist("content-type")
    if not any(name == "origin" or name.startswith("sec-fetch-") for name in headers):
        return None
    if routes is not None and all(route.matches(scope)[0] is not Match.FULL for route in routes):
        return None
    is_json = len(given) == 1 and given[0].split(";", 1)[0].strip().lower() == "application/json"
    if scope["method"] != "POST" or is_json:
        return None
    shown = f"is {given[0][:200]!r}" if given else "is missing"
    return BadRequestError(
        f"the header Content-Type {shown}: send Content-Type: application/json",
        status=415,
        code="unsupported_media_type",
    )


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether the page came from this server, under the address that the browser used.

    A host name counts only if nobody else can make it resolve to this machine. Otherwise (DNS rebinding) a page of
    evil.example could make that name resolve to this machine, and then send requests to its own origin.
    """
    return _is_own_name(origin) and urlsplit(origin).netloc.lower() == host.lower()


def _is_own_name(url: str) -> bool:
    """Whether the host of a URL is an address, or a name that leads to this machine alone."""
    try:
        name = urlsplit(url).hostname or ""
        if name != "localhost" and not name.endswith(".localhost"):
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
