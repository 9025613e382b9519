"""What requests of agents have for servers that run tools themselves, and what is the same in all of their APIs."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.common.unsupported import Table
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields
from nanoinfer.serve.protocol import ChatRequest

# Fields of a chat that mean the same in the requests of other APIs.
SAMPLING_FIELDS = (
    "model temperature top_p top_k min_p seed min_tokens presence_penalty frequency_penalty repetition_penalty "
    "stop_token_ids logit_bias allowed_token_ids bad_words ignore_eos thinking_token_budget skip_special_tokens "
    "chat_template_kwargs request_id stream"
).split()
NOT_RUN = "the server runs no tools itself"
# Tools that clients run, whose form the models of OpenAI and Anthropic were trained for: without them an agent can do
# nothing, and would not be told.
_OF_CLIENTS = re.compile(
    r"(local_shell|shell|apply_patch|namespace|tool_search|computer(_use_preview)?"
    r"|(bash|text_editor|computer|memory)_\d{8})"
)


def fields_of_chats(kind: Collection[str], others: dict[str, str]) -> Table:
    """Return a table of what to do instead of a chat's fields.

    Args:
        kind: the fields that a request of the other API has.
        others: what some of them are called there.
    """
    table = {name: ((), "it is a field of /v1/chat/completions: leave it out") for name in ChatRequest.model_fields}
    table |= {name: ((), f"give {other}") for name, other in others.items()}
    return {name: row for name, row in (ChatRequest.unsupported | table).items() if name not in kind}


def need(value: Any, kind: type, where: str, what: str, param: str) -> Any:
    """Return a part of a request. Raises BadRequestError if it is not of this kind."""
    if not isinstance(value, kind):
        raise BadRequestError(f"{where} is {shown(value)}: give {what}", param=param)
    return value


def leave_out_tool(where: str, kind: Any, allowed: str, fields: Fields) -> None:
    """Leave out a tool that servers run. Raises BadRequestError where its client would run it."""
    if isinstance(kind, str) and _OF_CLIENTS.fullmatch(kind):
        raise BadRequestError(
            f"{where} has the type {kind!r}, which the client runs in a form that other models were trained for: give "
            f"it as one of the type {allowed}, or leave it out",
            param="tools",
            code="unsupported_parameter",
        )
    fields.leave_out(f"a tool of the type {kind!r}", NOT_RUN)


def refuse(where: str, kind: Any, allowed: str, param: str) -> BadRequestError:
    """Return the error for a part of a request whose type is not supported."""
    return BadRequestError(f"{where} has the type {shown(kind)}: give {allowed}", param=param)
