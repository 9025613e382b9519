"""Answers in OpenAI's format, whole or as stream events; built from plain dicts, since each token writes an event."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

from nanoinfer.outputs import Logprob, StreamOutput
from nanoinfer.parsers.answer_format import OutputParser
from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Event, Message, Reasoning, Text, ToolCall
from nanoinfer.requests.token_bytes import TokenBytes
from nanoinfer.serve.errors import ApiError
from nanoinfer.serve.json_pieces import encode, in_turns, json_pieces
from nanoinfer.serve.protocol import GenerationRequest
from nanoinfer.serve.request_stream import Output
from nanoinfer.serve.shown_logprobs import ShownLogprobs, of_prompt, values
from nanoinfer.serve.tokenizing import Echo, Prompt

DONE = b"data: [DONE]\n\n"
LOOP_WORK = 1024  # some milliseconds
_OUTPUT_WORK = 8
PromptLogprobs = list[dict[int, Logprob] | None]


class Answer:
    """The answer to one HTTP request; choice i * n + j is completion j of prompt i.

    Args:
        model: the model's name as the client gave it.
        prompts: (text or None, token ids) of each prompt.
        has_text: whether there is a tokenizer.
        echoed: of each prompt, if the client wants them in front of the completions.
        token_bytes: what single tokens are made of.
    """

    wants_deltas = False
    """Whether the outputs come token by token where the answer is not streamed, too."""
    may_be_shorter = False
    """Whether what the client names is the most that it takes, and not what must fit."""
    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        prompts: list[Prompt],
        has_text: bool,
        echoed: list[Echo] | None = None,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self.request, self.prompts, self.n = request, prompts, request.n or 1
        self.name = f"{self.id_prefix}-{request.request_id or uuid.uuid4().hex}"
        self._head = {
            "id": self.name,
            "object": self.object_name,
            "created": int(time.time()),
            "model": model,
        }
        self._event_head = b"data: " + encode({**self._head, "object": self.chunk_object_name})[:-1].encode()
        self._echoed, self._shown = echoed, ShownLogprobs(TokenBytes(None) if token_bytes is None else token_bytes)
        self._may_be_silent = has_text and echoed is None and not request.return_token_ids
        self._num_generated = 0
        self._num_cached = [0] * len(prompts)
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}  # by prompt
        self._started: set[int] = set()  # choices that already had an output
        self._called: dict[int, bool] = {}  # completions that call tools, and whether the last call is whole
        self.parsers: list[OutputParser] = []  # of a conversation: one for each completion
        self.spoken = Message()  # of a conversation with one completion: what it says, with what is thought
        self.has_ended = False
        self.is_part_of: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        """The conversation that it answers, and the template's other arguments."""

    def work(self, outputs: Iterable[Output]) -> int:
        """Return how much work it is to read outputs and to write what they say, about in log-probabilities. What is
        more than `LOOP_WORK` is not done on the event loop, on which everybody waits for it."""
        return sum(self._work(place, output) for place, output in outputs)

    def _work(self, place: int, output: StreamOutput) -> int:
        per_token = 1 if output.logprobs_delta is None else 2 + (self.request.num_logprobs or 0)
        work, top = _OUTPUT_WORK + per_token * len(output.token_ids_delta), self.request.num_prompt_logprobs
        if top is not None and place * self.n + output.index not in self._started:
            work += (2 + top) * len(self.prompts[place][1])
        return work

    def whole(self, outputs: Iterable[Output]) -> Iterator[bytes]:
        """Yield parts of the body of the whole answer, b"" where others may have their turn in between.

        outputs: each is a whole completion.
        """
        choices: list[dict] = []
        for output in outputs:
            choices += self._choices([output], is_whole=True)
            yield b""
        body = self.body(sorted(choices, key=itemgetter("index")))
        yield from in_turns(json_pieces({**self._head, **body, "usage": self._usage()}))

    def body(self, choices: list[dict]) -> dict:
        return {"choices": choices}

    def first_events(self) -> bytes:
        """Return the events that are sent before the first token."""
        return b""

    def events(self, outputs: Iterable[Output]) -> bytes:
        """Return one event for each output that is not empty."""
        return b"".join(map(self._event, self._choices(outputs, is_whole=False)))

    def events_in_turns(self, outputs: Iterable[Output]) -> Iterator[bytes]:
        """Yield what `events` returns in parts, each of whole events, and b"" within a large one."""
        few, work = [], 0
        for output in outputs:
            more = self._work(*output)
            if few and work + more > LOOP_WORK:
                yield self.events(few)
                few, work = [], 0
            if more > LOOP_WORK:
                yield from self._large_events(output)
            else:
                few.append(output)
                work += more
        yield self.events(few)

    def _large_events(self, output: Output) -> Iterator[bytes]:
        for choice in self._choices([output], is_whole=False):
            head = self._event_head.decode() + ',"choices":['
            yield from in_turns(itertools.chain([head], json_pieces(choice), ["]}\n\n"]))

    def ping(self, done: int, total: int) -> bytes:
        """Return what is sent while there is nothing to send, so that nobody takes the server for dead: a comment.

        Args:
            done, total: how many tokens of the prompts are read, and of how many.
        """
        return b": %d of %d prompt tokens read\n\n" % (done, total)

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def last_events(self) -> bytes:
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return DONE
        return self._event_head + b',"choices":[],"usage":' + encode(self._usage()).encode() + b"}\n\n" + DONE

    def _event(self, choice: dict) -> bytes:
        return self._event_head + b',"choices":[' + encode(choice).encode() + b"]}\n\n"

    def _choices(self, outputs: Iterable[Output], is_whole: bool) -> Iterator[dict]:
        """Yield a choice for each output that is not empty."""
        for place, output in outputs:
            index, token_ids = place * self.n + output.index, output.token_ids_delta
            has_logprobs = output.logprobs_delta is not None
            self._num_generated += len(token_ids)
            if output.finished:
                self._num_cached[place] = output.metrics.num_cached_tokens
            if output.prompt_logprobs is not None:
                self._prompt_logprobs[place] = output.prompt_logprobs
            said = self.said(output)
            if not output.finished and self._may_be_silent and not said and not has_logprobs:
                continue  # part of a character, or of what may be a stop string or the begin of a call
            is_first = index not in self._started
            self._started.add(index)
            if is_first and self._echoed:
                said = self._echoed[place].text + said
            choice = {"index": index, **self.content(said, is_whole), "finish_reason": self.finish_reason(output)}
            choice["logprobs"] = self.logprobs(place, output, is_first) if has_logprobs else None
            if output.finished:
                choice["stop_reason"] = output.stop_reason
            if self.request.return_token_ids:
                choice["token_ids"] = token_ids
                if is_first:
                    choice["prompt_token_ids"] = self.prompts[place][1]
            if self.request.prompt_logprobs is not None:
                known, top = self._prompt_logprobs[place], self.request.prompt_logprobs
                choice["prompt_logprobs"] = of_prompt(self.prompts[place][1], known, top)
            yield choice

    def said(self, output: StreamOutput) -> Any:
        """Return what a completion gained, for `content`; nothing is false."""
        return output.text_delta

    def content(self, said: Any, is_whole: bool) -> dict:
        """Return the fields of a choice that hold what it says."""
        raise NotImplementedError

    def read(self, output: StreamOutput) -> list[Event]:
        """Return what a completion of a conversation gained: what was thought and said, and calls of tools."""
        parser = self.parsers[output.index]
        events = parser.push(output.text_delta, output.token_ids_delta)
        if output.finished:
            events += parser.finish()
        for event in events:
            if isinstance(event, CallBegun | CallEnded):
                self._called[output.index] = isinstance(event, CallEnded)
        if self.request.include_reasoning is False:
            events = [event for event in events if not isinstance(event, Reasoning)]
        self.spoken.add(events)
        self.has_ended |= output.finished
        return events

    def finish_reason(self, output: StreamOutput) -> str | None:
        """Return why a completion has ended; None: it goes on."""
        is_cut_off = isinstance(output.stop_reason, str) and not self._called.get(output.index)
        calls = output.index in self._called and output.finish_reason == "stop" and not is_cut_off
        return "tool_calls" if calls else output.finish_reason

    def logprobs(self, place: int, output: StreamOutput, is_first: bool) -> dict:
        """Return the log-probabilities of a choice's next tokens.

        Args:
            place: of the prompt.
            is_first: whether these are the choice's first ones.
        """
        raise NotImplementedError

    def _usage(self) -> dict:
        num_prompt = sum(len(token_ids) for _, token_ids in self.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},  # found in the prefix cache
        }


class CompletionAnswer(Answer):
    """For /v1/completions."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._held: dict[int, list[Output]] = {}  # by prompt

    def _work(self, place: int, output: StreamOutput) -> int:
        released = self._held.get(place, ()) if output.prompt_logprobs is not None else ()
        return super()._work(place, output) + sum(super(CompletionAnswer, self)._work(*held) for held in released)

    def _choices(self, outputs: Iterable[Output], is_whole: bool) -> Iterator[dict]:
        return super()._choices(self._in_order(outputs), is_whole)

    def _in_order(self, outputs: Iterable[Output]) -> Iterator[Output]:
        """Yield outputs, those of a prompt that is echoed with log-probabilities not before the one that has these."""
        for place, output in outputs:
            if self.request.only_echoes:
                output = replace(output, text_delta="", token_ids_delta=[], finish_reason="length", stop_reason=None)
                if output.logprobs_delta is not None:
                    output.logprobs_delta, output.text_offsets_delta = [], []
            is_known = output.prompt_logprobs is not None or place in self._prompt_logprobs
            if self.request.echoes_logprobs and not is_known:
                self._held.setdefault(place, []).append((place, output))
            else:
                yield place, output
                yield from self._held.pop(place, ())

    def content(self, said: str, is_whole: bool) -> dict:
        return {"text": said}

    def logprobs(self, place: int, output: StreamOutput, is_first: bool) -> dict:
        token_ids, entries, offsets = output.token_ids_delta, output.logprobs_delta, output.text_offsets_delta
        first = None
        if self._echoed:
            echo = self._echoed[place]
            first, offsets = echo.first, [len(echo.text) + offset for offset in offsets]
            if is_first:
                token_ids, offsets = [*self.prompts[place][1], *token_ids], [*echo.offsets, *offsets]
                entries = [*self._prompt_logprobs[place], *entries]
        return {
            "text_offset": offsets,
            "token_logprobs": values(token_ids, entries),
            "tokens": self._shown.names(token_ids, entries, first),
            "top_logprobs": self._shown.likeliest(token_ids, entries, self.request.logprobs),
        }


class ChatAnswer(Answer):
    """For /v1/chat/completions, which has one prompt."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def body(self, choices: list[dict]) -> dict:
        body = super().body(choices)
        for choice in choices:
            for name in ("prompt_token_ids", "prompt_logprobs"):
                if name in choice:
                    body[name] = choice.pop(name)
        return body

    def first_events(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(self.n)
        )

    def said(self, output: StreamOutput) -> list[Event]:
        return [event for event in self.read(output) if not isinstance(event, CallEnded)]

    def content(self, said: list[Event], is_whole: bool) -> dict:
        text = "".join(event.text for event in said if isinstance(event, Text))
        thought = "".join(event.text for event in said if isinstance(event, Reasoning))
        fields: dict[str, Any] = {"reasoning_content": thought, "reasoning": thought} if thought else {}
        if is_whole:
            if calls := [call_fields(call) for call in Message().add(said).tool_calls]:
                fields["tool_calls"] = calls
            return {"message": {"role": "assistant", "content": text or (None if calls else ""), **fields}}
        if calls := _call_deltas(said):
            fields["tool_calls"] = calls
        return {"delta": {"content": text, **fields} if text or not said else fields}

    def logprobs(self, place: int, output: StreamOutput, is_first: bool) -> dict:
        top = self.request.num_logprobs
        return {"content": self._shown.of_chat(output.token_ids_delta, output.logprobs_delta, top)}


def call_fields(call: ToolCall) -> dict:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_deltas(events: Iterable[Event]) -> list[dict]:
    """Return what calls gained: the first piece of one has its id and name."""
    deltas: dict[int, dict] = {}
    for event in events:
        if isinstance(event, CallBegun):
            deltas[event.index] = {"index": event.index, **call_fields(ToolCall(event.id, event.name))}
        elif isinstance(event, CallArguments):
            delta = deltas.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += event.text
    return list(deltas.values())
