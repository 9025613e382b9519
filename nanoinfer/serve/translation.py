"""What requests of agents have for servers that run tools themselves, and what is the same in all of their APIs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.common.unsupported import Table
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.protocol import ChatRequest

# Fields of a chat that mean the same in the requests of other APIs.
SAMPLING_FIELDS = (
    "model temperature top_p top_k min_p seed min_tokens presence_penalty frequency_penalty repetition_penalty "
    "stop_token_ids logit_bias allowed_token_ids bad_words ignore_eos skip_special_tokens chat_template_kwargs "
    "request_id stream"
).split()
NOT_RUN = "the server runs no tools itself"


def fields_of_chats(kind: Collection[str], others: dict[str, str]) -> Table:
    """Return a table of what to do instead of a chat's fields.

    Args:
        kind: the fields that a request of the other API has.
        others: what some of them are called there.
    """
    table = {name: ((), "it is a field of /v1/chat/completions: leave it out") for name in ChatRequest.model_fields}
    table |= {name: ((), f"give {other}") for name, other in others.items()}
    return {name: row for name, row in table.items() if name not in kind}


def need(value: Any, kind: type, where: str, what: str, param: str) -> Any:
    """Return a part of a request. Raises BadRequestError if it is not of this kind."""
    if not isinstance(value, kind):
        raise BadRequestError(f"{where} is {shown(value)}: give {what}", param=param)
    return value


def refuse(where: str, kind: Any, allowed: str, param: str) -> BadRequestError:
    """Return the error for a part of a request whose type is not supported."""
    return BadRequestError(f"{where} has the type {shown(kind)}: give {allowed}", param=param)
