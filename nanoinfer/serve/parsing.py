"""From the body of an HTTP request to a checked request of `protocol`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from nanoinfer.common.errors import unknown
from nanoinfer.common.unsupported import refusal
from nanoinfer.serve import json_body
from nanoinfer.serve.errors import SHOWN_CHARS, BadRequestError, shown
from nanoinfer.serve.protocol import IGNORED, MAX_STOP_STRINGS, UNSUPPORTED, Body, StreamOptions, too_many_stops

R = TypeVar("R", bound=Body)


def parse(kind: type[R], body: bytes, is_wanted: Callable[[], bool] = lambda: True) -> R:
    """Return a checked request from the body of an HTTP request.

    Args:
        is_wanted: as for `json_body.load`.

    Raises:
        BadRequestError: the body is not a JSON object, or a field is unknown, not supported or has a wrong value.
    """
    given = _load(body, is_wanted)
    fields = kind.model_fields
    for name, value in given.items():
        if name in UNSUPPORTED and name not in fields:
            if message := refusal(name, value, UNSUPPORTED, shown, json.dumps):
                raise BadRequestError(message, param=name, code="unsupported_parameter")
        elif name not in fields and name not in IGNORED:
            _refuse_unknown(name, fields, "the request")
    for name in given.get("stream_options") or () if isinstance(given.get("stream_options"), dict) else ():
        if name not in StreamOptions.model_fields:
            _refuse_unknown(name, StreamOptions.model_fields, "stream_options")
    stops = given.get("stop")
    if "stop" in fields and isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        raise too_many_stops(stops)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from error
    request.check()
    return request


def _refuse_unknown(name: str, allowed: Any, where: str) -> None:
    name = name[:SHOWN_CHARS]
    message = unknown(f"{where} has an unknown field", name, sorted(allowed))
    raise BadRequestError(message, param=name, code="unknown_parameter")


def _load(body: bytes, is_wanted: Callable[[], bool]) -> dict[str, Any]:
    try:
        given = json_body.load(body, is_wanted)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no valid JSON: {shown(str(error))}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise BadRequestError("the body is no JSON object: send {...}", code="invalid_json")
    return given


def _explained(error: ValidationError) -> BadRequestError:
    """Return the first error that pydantic found, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return BadRequestError(f"{name} is missing: it is required", param=name)
    given = "" if len(first["loc"]) > 1 and first["loc"][-1] in ("str", "list[str]") else shown(first["input"])
    path = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[str]"))
    return BadRequestError(f"{path}{' is ' + given if given else ''}: {first['msg']}", param=name)
