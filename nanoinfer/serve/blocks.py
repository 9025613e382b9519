"""Answers that consist of blocks, one behind the other: what was thought, what is said, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Event, Reasoning, Text
from nanoinfer.serve.answers import Answer
from nanoinfer.serve.errors import ApiError
from nanoinfer.serve.json_pieces import encode
from nanoinfer.serve.request_stream import Output

Fields = dict[str, Any]
_TURN_OUTPUTS = 64  # some milliseconds


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        id: of a call: by which its result will name it.
        name: of a call: the tool's.
        text: what was thought or said; of a call: the JSON text of the arguments.
        is_whole: False where the answer ended within it.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    id: str
    name: str = ""
    text: str = ""
    is_whole: bool = False


class BlockAnswer(Answer):
    """The answer to a conversation, which is one completion, in typed events that begin, grow and end blocks.

    The whole answer is made of what the stream's events are made of.
    """

    wants_deltas = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name = f"{self.id_prefix}_{self.request.request_id or uuid.uuid4().hex}"
        self.blocks: list[Block] = []
        self.num_reasoning_tokens = 0
        self.ended_by: str | None = None
        self.stop_reason: int | str | None = None
        self._open: Block | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompts[0][1])

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; 0 until the end."""
        return self._num_cached[0]

    @property
    def num_generated_tokens(self) -> int:
        return self._num_generated

    def whole(self, outputs: Iterable[Output]) -> Iterator[bytes]:
        remaining = iter(outputs)
        while some := list(islice(remaining, _TURN_OUTPUTS)):
            for _ in self._advance(some):
                pass
            yield b""
        yield encode(self.message()).encode()

    def first_events(self) -> bytes:
        return self._sse(self._begun_message())

    def events(self, outputs: Iterable[Output]) -> bytes:
        return self._sse(self._advance(outputs))

    def _large_events(self, output: Output) -> Iterator[bytes]:
        yield self.events([output])

    def last_events(self) -> bytes:
        return self._sse(self._ended_message())

    def message(self) -> Fields:
        """Return the answer as it is by now."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        raise NotImplementedError

    def _begun_message(self) -> Iterator[Fields]:
        raise NotImplementedError

    def _begun(self, block: Block) -> Iterator[Fields]:
        raise NotImplementedError

    def _grown(self, block: Block, text: str) -> Iterator[Fields]:
        raise NotImplementedError

    def _ended(self, block: Block) -> Iterator[Fields]:
        raise NotImplementedError

    def _ended_message(self) -> Iterator[Fields]:
        raise NotImplementedError

    def _numbered(self, event: Fields) -> Fields:
        """Return an event as it is sent."""
        return event

    def _sse(self, events: Iterable[Fields]) -> bytes:
        parts = (f"event: {event['type']}\ndata: {encode(self._numbered(event))}\n\n" for event in events)
        return "".join(parts).encode()

    def _advance(self, outputs: Iterable[Output]) -> Iterator[Fields]:
        for _, output in outputs:
            self._num_generated += len(output.token_ids_delta)
            for event in self.read(output):
                yield from self._take(event)
            if self._open is not None and self._open.kind == "reasoning":
                self.num_reasoning_tokens += len(output.token_ids_delta)
            if output.finished:
                self._num_cached[0] = output.metrics.num_cached_tokens
                self.ended_by, self.stop_reason = output.finish_reason, output.stop_reason
                is_whole = self.ended_by == "stop" and self._open is not None and self._open.kind != "call"
                yield from self._close(is_whole=is_whole)

    def _take(self, event: Event) -> Iterator[Fields]:
        match event:
            case Text(text):
                yield from self._grow("text", text)
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case CallBegun(_, call_id, name):
                yield from self._begin("call", call_id, name)
            case CallArguments(_, text):
                yield from self._grow("call", text)
            case CallEnded():
                yield from self._close()

    def _begin(self, kind: str, block_id: str, name: str = "") -> Iterator[Fields]:
        yield from self._close()
        self._open = Block(kind, len(self.blocks), block_id, name)
        self.blocks.append(self._open)
        yield from self._begun(self._open)

    def _grow(self, kind: str, text: str) -> Iterator[Fields]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind, uuid.uuid4().hex)
        self._open.text += text
        yield from self._grown(self._open, text)

    def _close(self, *, is_whole: bool = True) -> Iterator[Fields]:
        """End the block that is open, if one is."""
        if (block := self._open) is not None:
            self._open, block.is_whole = None, is_whole
            yield from self._ended(block)
