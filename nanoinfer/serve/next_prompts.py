"""What a conversation's next prompt will begin with: the history, and the answer as it went out."""

from __future__ import annotations

import asyncio
from typing import Any

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.events import Message
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.serve.answers import Answer, call_fields
from nanoinfer.serve.async_engine import AsyncEngine

_REASONING = ("reasoning_content", "reasoning")


class NextPrompts:
    """Has the beginnings of next prompts computed ahead. Used on the event loop."""

    def __init__(self, engine: AsyncEngine, template: ChatTemplate) -> None:
        self._engine, self._template = engine, template
        self._tasks: set[asyncio.Task] = set()

    def expect(self, answer: Answer) -> None:
        """Take an answer that was sent. What has gone on before, or has tools, is expected to go on."""
        if self._engine.computes_ahead and answer.is_part_of is not None and answer.has_ended and answer.n == 1:
            task = asyncio.create_task(self._offer(answer.spoken, *answer.is_part_of))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _offer(self, spoken: Message, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> None:
        earlier = [message for message in messages if message["role"] == "assistant"]
        if not (earlier or arguments.get("tools")):
            return
        sends_reasoning = any(message.get(name) for message in earlier for name in _REASONING)
        answer = message_of(spoken, with_reasoning=sends_reasoning)
        size = sum(len(str(message.get("content") or "")) for message in messages)
        try:
            beginning = await self._engine.prompts.aside(
                size, lambda: self._template.next_beginning(messages, answer, **arguments)
            )
        except RequestError:  # the template takes no such message
            return
        self._engine.offer(beginning)


def message_of(spoken: Message, *, with_reasoning: bool) -> dict[str, Any]:
    """Return an answer as the client will send it back."""
    calls = [call_fields(call) for call in spoken.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": spoken.content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if with_reasoning and spoken.reasoning:
        message["reasoning_content"] = spoken.reasoning
    return message
