"""Answers in the form of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nanoinfer.serve.blocks import Block, BlockAnswer, Fields
from nanoinfer.serve.errors import MESSAGES, ApiError

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessagesAnswer(BlockAnswer):
    """For /v1/messages."""

    id_prefix = "msg"
    may_be_shorter = True  # every request must name a limit, and that of agents is the largest model's

    def message(self) -> Fields:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [_content(block) for block in self.blocks],
            **self._stop(),
            "usage": self._usage(),
        }

    def ping(self, done: int, total: int) -> bytes:
        return super().ping(done, total) + self._sse([{"type": "ping"}])

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body(MESSAGES) + b"\n\n"

    def _begun_message(self) -> Iterator[Fields]:
        yield {"type": "message_start", "message": self.message()}
        yield {"type": "ping"}

    def _begun(self, block: Block) -> Iterator[Fields]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(block)}

    def _grown(self, block: Block, text: str) -> Iterator[Fields]:
        kind, name = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _ended(self, block: Block) -> Iterator[Fields]:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def _ended_message(self) -> Iterator[Fields]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stop(self) -> Fields:
        reason = sequence = None
        if self.ended_by == "length":
            is_full = self.num_generated_tokens < self.request.token_limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._calls_tools:
            reason = "tool_use"
        elif isinstance(self.stop_reason, str):
            reason, sequence = "stop_sequence", self.stop_reason
        elif self.ended_by is not None:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def _calls_tools(self) -> bool:
        """Whether there are whole calls, and no stop string has cut the last one off."""
        calls = [block.is_whole for block in self.blocks if block.kind == "call"]
        return any(calls) and (calls[-1] or not isinstance(self.stop_reason, str))

    def _usage(self) -> Fields:
        return {
            "input_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached_tokens,
            "output_tokens": self.num_generated_tokens,
        }


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        given = json.loads(block.text)
    except ValueError:  # it is cut
        given = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given if isinstance(given, dict) else {}}
