"""The errors that clients get when a request cannot be answered, in OpenAI's format, and what they show of a value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

SHOWN_CHARS = 80


class ApiError(Exception):
    """An answer with a status other than 200.

    Args:
        status: HTTP status.
        message: what was given, what is allowed, what to do.
        param: the field of the request that is at fault.
        code: OpenAI's short name for the error.
        closes: close the connection after the answer, because the rest of the request is not read.
    """

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.param, self.code = param, code
        self.headers = {"Connection": "close"} if closes else {}
        if status is not None:
            self.status = status

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


class BadRequestError(ApiError):
    status = 400
    type = "invalid_request_error"


class OverloadedError(ApiError):
    status = 429
    type = "overloaded_error"

    def __init__(self, message: str, *, closes: bool = False) -> None:
        super().__init__(message, code="overloaded", closes=closes)
        self.headers["Retry-After"] = "1"  # seconds after which another attempt makes sense


class UnavailableError(ApiError):
    status = 503
    type = "service_unavailable_error"


def shown(value: Any) -> str:
    """Return the beginning of a long text, or of the value's `repr`; all of a large value's would take seconds."""
    text = ""
    for part in [value] if isinstance(value, str) and len(value) > SHOWN_CHARS else _repr_parts(value):
        text += part
        if len(text) > SHOWN_CHARS:
            return text[:SHOWN_CHARS] + "..."
    return text


def _repr_parts(value: Any) -> Iterator[str]:
    if isinstance(value, list | dict):
        brackets = "[]" if isinstance(value, list) else "{}"
        yield brackets[0]
        for place, one in enumerate(value):
            yield ", " if place else ""
            yield from _repr_parts(one)
            if isinstance(value, dict):
                yield ": "
                yield from _repr_parts(value[one])
        yield brackets[1]
    else:
        yield repr(value[: SHOWN_CHARS + 1] if isinstance(value, str) else value)
