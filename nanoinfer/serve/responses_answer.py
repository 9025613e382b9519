"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from nanoinfer.serve.blocks import Block, BlockAnswer, Fields
from nanoinfer.serve.errors import ApiError
from nanoinfer.serve.response_tools import Tool
from nanoinfer.serve.responses_request import ResponsesRequest

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesAnswer(BlockAnswer):
    """For /v1/responses.

    Args:
        asked: the request as it came; `arguments` are those of `Answer`.
    """

    id_prefix = "resp"

    def __init__(self, asked: ResponsesRequest, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asked, self._tools = asked, asked.known_tools
        self._numbers = itertools.count()
        self._created = int(time.time())

    def message(self) -> Fields:
        is_cut = self.ended_by == "length"
        status = "in_progress" if self.ended_by is None else "incomplete" if is_cut else "completed"
        return self._response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=[self._item(block) for block in self.blocks],
            usage=None if self.ended_by is None else self._usage(),
        )

    def ping(self, done: int, total: int) -> bytes:
        """An event, as there are clients that count the seconds between events and see no comments."""
        return super().ping(done, total) + self._sse([self._lifecycle("in_progress")])

    def failure(self, error: ApiError) -> bytes:
        failed = {"code": error.code or "server_error", "message": str(error)}
        return self._sse([{"type": "response.failed", "response": self._response("failed", error=failed)}])

    def _numbered(self, event: Fields) -> Fields:
        return {"type": event.pop("type"), "sequence_number": next(self._numbers), **event}

    def _begun_message(self) -> Iterator[Fields]:
        yield self._lifecycle("created")
        yield self._lifecycle("in_progress")

    def _begun(self, block: Block) -> Iterator[Fields]:
        yield {
            "type": "response.output_item.added",
            "output_index": block.index,
            "item": self._item(block, "in_progress"),
        }
        if block.kind != "call":
            yield self._part_event("added", block)

    def _grown(self, block: Block, text: str) -> Iterator[Fields]:
        if block.kind == "call":
            if not self._tool(block).is_custom:  # which is text, but comes as JSON: it is sent when it is whole
                yield {"type": "response.function_call_arguments.delta", **_at(block), "delta": text}
        elif block.kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **_at(block), "content_index": 0, "delta": text}
        else:
            where = {**_at(block), "content_index": 0}
            yield {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}

    def _ended(self, block: Block) -> Iterator[Fields]:
        where = _at(block)
        if block.kind == "call" and self._tool(block).is_custom:
            text = _input(block)
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": text}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": text}
        elif block.kind == "call":
            done = {"name": self._tool(block).name, "arguments": block.text}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        else:
            where["content_index"] = 0
            if block.kind == "reasoning":
                yield {"type": "response.reasoning_text.done", **where, "text": block.text}
            else:
                yield {"type": "response.output_text.done", **where, "text": block.text, "logprobs": []}
            yield self._part_event("done", block)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": self._item(block)}

    def _ended_message(self) -> Iterator[Fields]:
        response = self.message()
        yield {"type": f"response.{response['status']}", "response": response}

    def _tool(self, block: Block) -> Tool:
        """Return the tool that a call is of, as the client knows it."""
        return self._tools.get(block.name) or Tool(block.name, is_custom=False)

    def _lifecycle(self, name: str) -> Fields:
        return {"type": f"response.{name}", "response": self._response("in_progress")}

    def _part_event(self, name: str, block: Block) -> Fields:
        return {"type": f"response.content_part.{name}", **_at(block), "content_index": 0, "part": _part(block)}

    def _item(self, block: Block, status: str | None = None) -> Fields:
        status = status or ("completed" if block.is_whole else "incomplete")
        item = {"id": _item_id(block), "status": status}
        if block.kind == "call":
            tool = self._tool(block)
            item |= {"call_id": block.id, "name": tool.name}
            if tool.namespace is not None:
                item["namespace"] = tool.namespace
            if tool.is_custom:
                return {"type": "custom_tool_call", **item, "input": "" if status == "in_progress" else _input(block)}
            return {"type": "function_call", **item, "arguments": block.text}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "text":
            return {"type": "message", **item, "role": "assistant", "content": content}
        item |= {"summary": [], "content": content}
        if self._asked.wants_encrypted:
            item["encrypted_content"] = block.text
        return {"type": "reasoning", **item}

    def _response(self, status: str, **fields: Any) -> Fields:
        asked, chat = self._asked, self.request
        reasoning = asked.reasoning or {}
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._head["model"],
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": chat.temperature,
            "text": {"format": (asked.text or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }

    def _usage(self) -> Fields:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
        }


def _item_id(block: Block) -> str:
    return f"{_PREFIX[block.kind]}_{block.id}"


def _at(block: Block) -> Fields:
    return {"item_id": _item_id(block), "output_index": block.index}


def _part(block: Block) -> Fields:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _input(block: Block) -> str:
    """Return the text that a call of a tool with text has; where the model wrote no such arguments, all it wrote."""
    try:
        return str(json.loads(block.text)["input"])
    except (ValueError, KeyError, TypeError):
        return block.text
