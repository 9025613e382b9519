"""JSON of requests: the values of a body, of which there may be so many."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

from pydantic_core import from_json

MAX_VALUES = (
    200_000  # lists, objects and texts; a body of 32 MiB may hold millions, each of which takes 60 bytes and more
)
_VALUES = re.compile(rb'[\[{]|"(?:[^"\\]+|\\.)*+"', re.DOTALL)


def load(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or has a constant such as NaN, half a surrogate pair, or more than
            `MAX_VALUES` values.
        RecursionError: the text is nested too deeply.
    """
    if (encoding := json.detect_encoding(body)) != "utf-8":
        body = body.decode(encoding).encode()
    # The first look is quick, but takes what is in texts for values, too.
    if sum(map(body.count, b'[{"')) > MAX_VALUES:
        if sum(1 for _ in islice(_VALUES.finditer(body), MAX_VALUES + 1)) > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} lists, objects and texts: send less at once")
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RecursionError from error
        has_constant = b"NaN" in body or b"Infinity" in body
        raise ValueError(f"{error}{' (NaN and Infinity are no JSON numbers)' * has_constant}") from error
