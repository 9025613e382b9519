"""Requests of OpenAI's Responses API, and what they are as requests of the chat API. Nothing is kept between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import TypedDict

from nanoinfer.common.errors import shown
from nanoinfer.common.unsupported import by_advice
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields
from nanoinfer.serve.protocol import NESTED, Count, Limit, SampledRequest
from nanoinfer.serve.response_tools import Tool, chosen, functions_of, known_as, tools_by_name
from nanoinfer.serve.translation import SAMPLING_FIELDS, fields_of_chats, need, refuse

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ITEMS = "message, reasoning, function_call, function_call_output, custom_tool_call or custom_tool_call_output"
SEND_ITEMS = "the server keeps no answers: send all items of the conversation in input"
ENCRYPTED = "reasoning.encrypted_content"
"""Asks for reasoning in a form that comes back. Some clients send back this form only, so it has the text itself."""


class TextForm(TypedDict, total=False):
    __pydantic_config__ = NESTED

    type: str | None
    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None


class TextOptions(TypedDict, total=False):
    __pydantic_config__ = NESTED

    format: TextForm | None
    verbosity: str | None


class Reasoning(TypedDict, total=False):
    __pydantic_config__ = NESTED

    effort: str | None
    summary: str | None
    max_tokens: int | None


class ResponsesRequest(SampledRequest):
    input: Any
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    min_tokens: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    ignored: ClassVar = frozenset(("max_tool_calls", "client_metadata", "prompt_cache_options", "user", "store"))

    def check(self) -> None:
        super().check()
        for name in self.include or ():
            if "logprobs" in name:
                raise BadRequestError(f"include has {name!r}, which is not supported: leave it out", param="include")
        text = self.text or {}
        if text.get("verbosity") not in (None, "medium"):
            raise BadRequestError(
                f"text.verbosity={shown(text['verbosity'])} is not supported: leave it out", param="text"
            )

    @property
    def wants_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())

    @property
    def known_tools(self) -> dict[str, Tool]:
        """The tools by the names that the model knows."""
        return tools_by_name(self.tools or ())

    def chat(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of a chat request. Raises BadRequestError."""
        given = {name: getattr(self, name, None) for name in SAMPLING_FIELDS}
        given |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        given |= {"reasoning": self.reasoning, "response_format": self._response_format()}
        if tools := functions_of(self.tools or (), fields):
            choice = self.tool_choice
            given |= {"tools": tools, "tool_choice": chosen(choice, self.tools) if isinstance(choice, dict) else choice}
            given |= {"parallel_tool_calls": self.parallel_tool_calls}
        elif self.tool_choice not in (None, "none", "auto"):
            raise BadRequestError(
                f"tool_choice is {shown(self.tool_choice)}, but there are no tools", param="tool_choice"
            )
        return {name: value for name, value in given.items() if value is not None}

    def _response_format(self) -> dict[str, Any] | None:
        form = (self.text or {}).get("format") or {}
        if form.get("type") != "json_schema":
            return form or None
        names = ("name", "description", "schema", "strict")
        return {"type": "json_schema", "json_schema": {name: form[name] for name in names if name in form}}

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            items: list[Any] = [{"role": "user", "content": self.input}]
        else:
            items = need(self.input, list, "input", "a text or a list of items", "input")
        conversation = _Conversation()
        if self.instructions:
            conversation.add("system", self.instructions)
        for place, item in enumerate(items):
            conversation.take(f"input[{place}]", need(item, dict, f"input[{place}]", "an object", "input"))
        return conversation.messages


ResponsesRequest.unsupported = fields_of_chats(
    ResponsesRequest.model_fields.keys() | ResponsesRequest.ignored,
    {
        "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    },
) | by_advice({
    SEND_ITEMS: dict(previous_response_id=(), conversation=(), prompt=()),
    "the answer comes with the request": dict(background=(False,)),
    "what is too long is refused": dict(truncation=("disabled",)),
    "leave it out": dict(top_logprobs=(0,), moderation=(), image=(), context_management=()),
})  # fmt: skip


class _Conversation:
    """Makes messages of items. Reasoning and calls that follow each other are one message of the assistant's."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""

    def add(self, role: str, content: str) -> None:
        last = self.messages[-1] if self.messages else None
        if role == "assistant":
            self._assistant(None if last is None or "tool_calls" in last or last.get("content") else last)[
                "content"
            ] = content
        else:
            self._reasoning = ""
            self.messages.append({"role": role, "content": content})

    def take(self, where: str, item: Mapping[str, Any]) -> None:
        """Take the next item. Raises BadRequestError."""
        kind = item.get("type", "message")
        if kind == "message":
            role = need(item.get("role"), str, f"{where}.role", '"user", "assistant", "system" or "developer"', "input")
            content = _text(f"{where}.content", item.get("content"))
            self.add(role, content)
        elif kind == "reasoning":
            parts = item.get("content") or ([] if item.get("encrypted_content") else item.get("summary")) or []
            self._reasoning += _text(f"{where}.content", parts) or str(item.get("encrypted_content") or "")
        elif kind in ("function_call", "custom_tool_call"):
            call_id, name = (
                need(item.get(one), str, f"{where}.{one}", "a text", "input") for one in ("call_id", "name")
            )
            if kind == "function_call":
                arguments = need(item.get("arguments"), str, f"{where}.arguments", "JSON as text", "input")
            else:
                arguments = as_arguments(need(item.get("input"), str, f"{where}.input", "a text", "input"))
            namespace = item.get("namespace")
            if namespace is not None:
                need(namespace, str, f"{where}.namespace", "a text", "input")
            function = {"name": known_as(name, namespace), "arguments": arguments}
            last = self.messages[-1] if self.messages and not self._reasoning else None
            self._assistant(last).setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": function}
            )
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = need(item.get("call_id"), str, f"{where}.call_id", "a text", "input")
            content = _text(f"{where}.output", item.get("output"))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "item_reference":
            raise BadRequestError(f"{where} refers to another item: {SEND_ITEMS}", param="input")
        else:
            raise refuse(where, kind, _ITEMS, "input")

    def _assistant(self, last: dict[str, Any] | None) -> dict[str, Any]:
        """Return the message of the assistant's that goes on: the last one, or a new one with what was thought."""
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        if self._reasoning:
            last["reasoning_content"], self._reasoning = self._reasoning, ""
        return last


def as_arguments(text: str) -> str:
    """Return the input of a tool that takes text as the arguments of a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _text(where: str, content: Any) -> str:
    """Return the text of what an item holds: text or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = need(content, list, where, "a text or a list of parts", "input")
    texts = []
    for place, part in enumerate(parts):
        kind = need(part, dict, f"{where}[{place}]", "an object", "input").get("type")
        if kind == "refusal":
            part = {"text": part.get("refusal")}
        elif kind not in _TEXT_PARTS:
            raise refuse(f"{where}[{place}]", kind, "input_text or output_text", "input")
        texts.append(need(part.get("text"), str, f"{where}[{place}].text", "a text", "input"))
    return "\n".join(texts)
