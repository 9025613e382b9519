"""Requests of Anthropic's Messages API, and what they are as requests of the chat API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from nanoinfer.common.errors import shown
from nanoinfer.common.unsupported import by_advice
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields
from nanoinfer.serve.protocol import INT32_MAX, NESTED, Body, SampledRequest
from nanoinfer.serve.translation import SAMPLING_FIELDS, fields_of_chats, leave_out_tool, need, refuse

# Claude Code's first system block: it has another hash in each request and is not meant for a model. With it no two
# requests would begin alike, and the prefix cache would find nothing.
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"xhigh": "high", "max": "high"}  # Anthropic's, of which chat templates know no others than OpenAI's


class OutputForm(TypedDict, total=False):
    __pydantic_config__ = NESTED

    type: str | None
    schema: dict[str, Any] | None


class OutputConfig(TypedDict, total=False):
    __pydantic_config__ = NESTED

    effort: str | None
    format: OutputForm | None


class ToolChoice(TypedDict, total=False):
    __pydantic_config__ = NESTED

    type: str
    name: str | None
    disable_parallel_tool_use: bool | None


class Thinking(TypedDict, total=False):
    __pydantic_config__ = NESTED

    type: str | None
    budget_tokens: int | None


class CountRequest(Body):
    """What is counted: the fields of a request that its prompt is made of."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    ignored: ClassVar = frozenset(
        "cache_control context_management diagnostics inference_geo speed user_profile_id workspace_id betas".split()
    )

    def check(self) -> None:
        super().check()
        if self.messages and isinstance(self.messages[-1], dict) and self.messages[-1].get("role") == "assistant":
            raise BadRequestError(
                "the last message is the assistant's, and to go on with it is not supported: end with the user's, or "
                "complete a finished prompt with /v1/completions",
                param="messages",
            )

    def chat(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of a chat request. Raises BadRequestError."""
        given = {name: getattr(self, name, None) for name in SAMPLING_FIELDS}
        given |= {"messages": self._messages(), "reasoning_effort": self._effort(), "thinking": self.thinking}
        form = (self.output_config or {}).get("format")
        if form:
            schema = {"name": "output", "schema": form.get("schema"), "strict": True}
            given["response_format"] = {"type": form.get("type"), "json_schema": schema}
        choice = self.tool_choice or {}
        if tools := self._tools(fields):
            given |= {"tools": tools, "tool_choice": self._tool_choice(choice)}
            if choice.get("disable_parallel_tool_use") is not None:
                given["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
        elif choice.get("type") in ("any", "tool"):
            raise BadRequestError(f"tool_choice is {shown(choice)}, but there are no tools", param="tool_choice")
        return {name: value for name, value in given.items() if value is not None}

    def _effort(self) -> str | None:
        if (self.thinking or {}).get("type") == "disabled":
            return "none"
        effort = (self.output_config or {}).get("effort")
        return _EFFORTS.get(effort, effort)

    def _tools(self, fields: Fields) -> list[dict[str, Any]]:
        tools = []
        for place, tool in enumerate(self.tools or ()):
            where = f"tools[{place}]"
            kind = need(tool, dict, where, "an object", "tools").get("type")
            if kind not in (None, "custom"):
                leave_out_tool(where, kind, '"custom"', fields)
                continue
            function = {
                "name": need(tool.get("name"), str, f"{where}.name", "a text", "tools"),
                "parameters": need(tool.get("input_schema"), dict, f"{where}.input_schema", "a JSON Schema", "tools"),
            }
            function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
            tools.append({"type": "function", "function": function})
        return tools

    def _tool_choice(self, choice: Mapping[str, Any]) -> Any:
        kind = choice.get("type", "auto")
        if kind == "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if kind not in _CHOICES:
            raise BadRequestError(
                f'tool_choice is {shown(choice)}: give one of the type "auto", "any", "tool" or "none"',
                param="tool_choice",
            )
        return _CHOICES[kind]

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        blocks = [{"type": "text", "text": self.system}] if isinstance(self.system, str) else self.system or []
        if system := _texts("system", [block for block in blocks if not _is_billing(block)], "system"):
            messages.append({"role": "system", "content": system})
        for place, message in enumerate(self.messages):
            where = f"messages[{place}]"
            role = need(message, dict, where, "an object", "messages").get("role")
            content = message.get("content")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            blocks = need(content, list, f"{where}.content", "a text or a list of blocks", "messages")
            if role == "assistant":
                messages.append(_assistant(where, blocks))
            elif role in ("user", "system"):
                messages += _results(where, blocks)
                rest = [block for block in blocks if block.get("type") != "tool_result"]
                if rest or not blocks:
                    messages.append({"role": role, "content": _texts(where, rest, "messages")})
            else:
                raise BadRequestError(f'{where}.role is {shown(role)}: give "user" or "assistant"', param="messages")
        return messages


class MessagesRequest(CountRequest, SampledRequest):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: list[str] | None = None

    def chat(self, fields: Fields) -> dict[str, Any]:
        given = super().chat(fields) | {"max_completion_tokens": self.max_tokens}
        return given | ({"stop": self.stop_sequences} if self.stop_sequences else {})


for _kind in (CountRequest, MessagesRequest):
    _kind.unsupported = fields_of_chats(
        MessagesRequest.model_fields.keys() | CountRequest.ignored,
        {
            "max_completion_tokens": "max_tokens", "stop": "stop_sequences", "reasoning_effort": "output_config.effort",
            "response_format": "output_config.format",
        },
    ) | by_advice({"the server runs no tools itself": dict(mcp_servers=([],), container=())})  # fmt: skip
CountRequest.ignored |= MessagesRequest.model_fields.keys() - CountRequest.model_fields.keys()


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def _assistant(where: str, blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    said, thought, calls = [], [], []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        match need(block, dict, here, "an object", "messages").get("type"):
            case "thinking":
                thought.append(need(block.get("thinking"), str, f"{here}.thinking", "a text", "messages"))
            case "redacted_thinking":
                pass  # nobody can read it
            case "tool_use":
                call_id, name = (
                    need(block.get(one), str, f"{here}.{one}", "a text", "messages") for one in ("id", "name")
                )
                given = need(block.get("input"), dict, f"{here}.input", "an object", "messages")
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                said.append(block)
    message["content"] = _texts(where, said, "messages", "text, thinking or tool_use")
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _results(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Return the messages with the results of tools, which come before what else the user says."""
    results = []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        if need(block, dict, here, "an object", "messages").get("type") == "tool_result":
            call_id = need(block.get("tool_use_id"), str, f"{here}.tool_use_id", "a text", "messages")
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = _texts(
                    here, need(content, list, f"{here}.content", "a text or blocks", "messages"), "messages"
                )
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return results


def _texts(where: str, blocks: list[Any], param: str, allowed: str = "text or tool_result") -> str:
    texts = []
    for block in blocks:
        kind = need(block, dict, f"a block of {where}", "an object", param).get("type")
        if kind != "text":
            raise refuse(f"a block of {where}", kind, allowed, param)
        texts.append(need(block.get("text"), str, f"the text of {where}", "a text", param))
    return "\n".join(texts)
