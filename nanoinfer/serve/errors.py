"""The errors that clients get when a request cannot be answered, in OpenAI's form, or in Anthropic's."""

from __future__ import annotations

import json

MESSAGES = "/v1/messages"
"""The path of Anthropic's API, whose errors have another form."""
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer with a status other than 200.

    Args:
        status: HTTP status.
        message: what was given, what is allowed, what to do.
        param: the field of the request that is at fault.
        code: OpenAI's short name for the error.
        closes: close the connection after the answer, because the rest of the request is not read.
        lengths: as of `RequestError`. Agents on Anthropic's API know a prompt that is too long by these words, and
            shorten their history then.
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
        lengths: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.lengths = param, code, lengths
        self.headers = {"Connection": "close"} if closes else {}
        if status is not None:
            self.status = status

    def body(self, path: str = "") -> bytes:
        """Return the answer's body, in the form of the API that the path is of."""
        if path.startswith(MESSAGES):
            said = str(self)
            if self.lengths is not None:
                said = "prompt is too long: {} tokens > {} maximum: shorten it or raise max_model_len".format(
                    *self.lengths
                )
            error = {"type": _ANTHROPIC.get(self.status, "api_error"), "message": said}
            return json.dumps({"type": "error", "error": error}).encode()
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


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
