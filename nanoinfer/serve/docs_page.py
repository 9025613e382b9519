"""The page /docs: endpoints and the fields of their requests, made from the models that check these. No network."""

from __future__ import annotations

import functools
from html import escape
from typing import Any

import nanoinfer
from nanoinfer.serve.budgets import BUDGET, OTHER_NAMES
from nanoinfer.serve.fields import IGNORED, UNSUPPORTED
from nanoinfer.serve.messages_request import CountRequest, MessagesRequest
from nanoinfer.serve.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from nanoinfer.serve.responses_request import ResponsesRequest

DOCS_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}  # nothing is fetched or run

# Path: method, what it does, the model of its request.
ENDPOINTS: dict[str, tuple[str, str, type[Body] | None]] = {
    "/": ("GET", "A page with a chat and a picture of what the engine does, unless it was left out.", None),
    "/v1/chat/completions": ("POST", "Completes a conversation, through the model's chat template.", ChatRequest),
    "/v1/completions": ("POST", "Completes text or token ids.", CompletionRequest),
    "/v1/responses": ("POST", "OpenAI's Responses API; nothing is kept between requests.", ResponsesRequest),
    "/v1/messages": ("POST", "Anthropic's Messages API.", MessagesRequest),
    "/v1/messages/count_tokens": ("POST", "How many tokens such a request has.", CountRequest),
    "/tokenize": ("POST", "Token ids of a text or a conversation.", TokenizeRequest),
    "/detokenize": ("POST", "The text of token ids.", DetokenizeRequest),
    "/v1/models": ("GET", "What is served; /v1/models/NAME: one of it.", None),
    "/health": ("GET", "200, or 503 with the reason.", None),
    "/ping": ("GET, POST", "The same as /health.", None),
    "/metrics": ("GET", "Prometheus.", None),
    "/engine": ("GET", "What the engine does: its figures, and what they mean.", None),
    "/engine/events": ("GET", "The same as server-sent events, at most five a second.", None),
    "/version": ("GET", "The version of nanoinfer.", None),
    "/docs": ("GET", "This page.", None),
}
_STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{border:1px solid #8888;padding:.2em .6em;text-align:left;vertical-align:top}"
    "code{font-family:monospace}"
)


@functools.cache
def docs_page() -> str:
    """Return the page as HTML."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>nanoinfer serve</title><style>{_STYLE}</style>",
        f"<h1>nanoinfer serve {escape(nanoinfer.__version__)}</h1>",
        "<p>Fields mean what they mean in OpenAI's API and vLLM's; <code>docs/serve.md</code> says more.</p>",
        _table(
            ("path", "method", "what"),
            [(_code(path), method, escape(what)) for path, (method, what, _) in ENDPOINTS.items()],
        ),
    ]
    for path, (_, _, kind) in ENDPOINTS.items():
        if kind is not None:
            parts.append(f"<h2>{escape(path)}</h2>" + _table(("field", "value"), _fields(kind)))
    parts.append("<h2>Taken, and without influence</h2><p>" + ", ".join(map(_code, sorted(IGNORED))) + "</p>")
    names = ", ".join(map(_code, OTHER_NAMES))
    parts.append(
        f"<p>Other names of {_code(BUDGET)}: {names}; in chats also {_code('budget_tokens')} of {_code('thinking')} "
        f"and {_code('max_tokens')} of {_code('reasoning')}.</p>"
    )
    refused = [(_code(name), escape(advice)) for name, (_, advice) in sorted(UNSUPPORTED.items())]
    parts.append("<h2>Refused, as it would change the answer</h2>" + _table(("field", "instead"), refused))
    return "\n".join(parts) + "\n</html>\n"


def _fields(kind: type[Body]) -> list[tuple[str, str]]:
    schema = kind.model_json_schema()
    needed, definitions = schema.get("required", ()), schema.get("$defs", {})
    return [
        (_code(name), escape(_value(field, definitions)) + (", <b>required</b>" if name in needed else ""))
        for name, field in schema["properties"].items()
    ]


def _value(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return in words what a JSON schema of pydantic's allows."""
    if "$ref" in field:
        members = definitions[field["$ref"].rpartition("/")[2]]["properties"]
        return f"object with {', '.join(members)}"
    if options := field.get("anyOf"):
        return " or ".join(_value(one, definitions) for one in options if one.get("type") != "null")
    kind = field.get("type", "any")
    if kind == "array":
        text = f"list of {_value(field['items'], definitions)}" if field.get("items") else "list"
        return text + (f", at most {field['maxItems']}" if "maxItems" in field else "")
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None or high is not None:
        return f"{kind}, {low} to {high}"
    return kind


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head), *("".join(f"<td>{c}</td>" for c in row) for row in rows)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _code(name: str) -> str:
    return f"<code>{escape(name)}</code>"
