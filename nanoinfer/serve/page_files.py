"""The page at `/`: static files, which the server reads once and sends as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing is fetched from elsewhere or run but these files, whatever a model writes; text never becomes HTML but through
# the library that cleans it.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page and of its files."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES]
    files = {path.relative_to(FOLDER).as_posix(): (path.read_bytes(), _TYPES[path.suffix]) for path in paths}

    def sent(request: Request, name: str) -> Response:
        if name not in files:
            return Response("no such file", 404, HEADERS, "text/plain")
        body, kind = files[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = HEADERS | {"ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    async def index(request: Request) -> Response:
        return sent(request, "index.html")

    async def file(request: Request) -> Response:
        return sent(request, request.path_params["name"])

    return [Route("/", index), Route("/page/{name:path}", file)]
