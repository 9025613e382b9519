"""What all endpoints do with a request: read it, check it, give it to the engine, and answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import PROMPT_END_TOKENS
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.sampling_params import Advised, SamplingParams
from nanoinfer.serve.answers import Answer
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.client import EventStream, read_body, while_client_stays, whole_answer
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields, checked, parse
from nanoinfer.serve.forms import behind_thinking, form_of
from nanoinfer.serve.next_prompts import NextPrompts
from nanoinfer.serve.protocol import Body, ChatRequest
from nanoinfer.serve.request_stream import RequestStream
from nanoinfer.serve.tool_use import ToolUse
from nanoinfer.serve.waiting_bytes import MAX_BODY_BYTES

_LARGE_BODY_BYTES = 65_536  # parsing takes about a millisecond
TOO_LONG = "context_length_exceeded"
B = TypeVar("B", bound=Body)
T = TypeVar("T", bound=Body)
Prepared = tuple[Answer, SamplingParams]


class Responder:
    """Answers requests on one engine.

    Args:
        names: that clients may use for the model; an answer has the name that its request used.
        fields: which names of fields requests may have.
        template: how the model is written to, and how it writes its answers.
        body_timeout: seconds in which a request's body must arrive.
        sleep: as for `EventStream`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        names: Sequence[str],
        fields: Fields,
        template: ChatTemplate,
        body_timeout: float,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.engine, self.names, self.form = engine, list(names), template.form
        self.template, self._next = template, NextPrompts(engine, template)
        self._fields, self._body_timeout, self._pause = fields, body_timeout, sleep

    def model_name(self, asked: str | None) -> str:
        """Return the name that an answer shows; the first one if a request names no model."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise BadRequestError(
                f"the model {asked[:200]!r} is not served here: use {' or '.join(map(repr, self.names))}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked

    async def parsed(self, kind: type[B], body: bytes) -> B:
        """Like `parse`, but large bodies are parsed on a thread, so that the event loop is not blocked."""
        if len(body) <= _LARGE_BODY_BYTES:
            return parse(kind, body, self._fields)
        return await self.engine.prompts.read(len(body), lambda: parse(kind, body, self._fields))

    async def parsed_chat(self, kind: type[T], body: bytes) -> tuple[T, ChatRequest]:
        """Return a request of another API, and what it is as a chat request. Its class has a method `chat`."""

        def read() -> tuple[T, ChatRequest]:
            asked = parse(kind, body, self._fields)
            return asked, checked(ChatRequest, asked.chat(self._fields), self._fields)

        if len(body) <= _LARGE_BODY_BYTES:
            return read()
        return await self.engine.prompts.read(len(body), read)

    async def chat(self, asked: ChatRequest, num_bytes: int, answer: Callable[..., Answer]) -> Prepared:
        """Return the answer to a conversation, still without tokens, and its parameters.

        Args:
            num_bytes: size of the conversation as it was received.
            answer: the answer's class.
        """
        model, form, prompts = self.model_name(asked.model), self.form, self.engine.prompts
        use = ToolUse.of(asked, form)
        # None: what the prompt leaves.
        params = asked.sampling_params({"max_tokens": None} | self.engine.sampling_defaults)
        arguments = use.template_arguments(asked, form)

        messages: list[dict[str, Any]] = []

        def templated(**how: bool) -> list[int] | str:
            messages[:] = asked.conversation()
            return self.template.encode(messages, **arguments, **how)

        prompt = await prompts.tokenize_chat(templated, num_bytes)
        made = answer(asked, model, [prompt], prompts.has_text, None, prompts.token_bytes)
        made.is_part_of = messages, arguments
        end = await prompts.text_of((None, prompt[1][-PROMPT_END_TOKENS:]))
        constrained = use.constrained(params, form, end)
        if constrained is not params:
            try:
                await prompts.limits(constrained)  # compiled, and kept
            except RequestError as error:
                if error.field == "structured_outputs":  # which the client has not given
                    raise use.explained(error, constrained.structured_outputs.grammar) from error
                raise
        else:
            constrained = behind_thinking(params, form, end)
        params, drops = constrained, params.skip_special_tokens
        made.parsers = [use.parser(form, end, drops_special=drops) for _ in range(params.n)]
        if form.sees_special(bool(use.tools)):
            params = replace(params, skip_special_tokens=False)
        if params.max_tokens is not None and (made.may_be_shorter or not self._fields.refuses_unknown):
            params = replace(params, max_tokens=Advised(params.max_tokens))
        if made.may_be_shorter and form.bounds is None:  # clients of that API always name a budget
            params = replace(params, thinking_token_budget=None)
        return made, params

    async def generate(self, request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, Prepared]]) -> Response:
        """Answer a request with what the engine generates. `prepare` is called with the request's body."""
        arrival, engine = time.perf_counter(), self.engine
        with ExitStack() as charge:
            body = await self._read(request, charge, MAX_BODY_BYTES)
            answer, params = await while_client_stays(request.receive, prepare(body))
            del body  # the answer may take long
            if not answer.may_be_shorter and (error := _too_many(answer, engine.plan.max_model_len)) is not None:
                if not isinstance(params.max_tokens, Advised):
                    raise error
                self._fields.note("max_tokens", "%s; a chat gets what there is room for, here and later", str(error))
            try:
                limits, is_streamed = await engine.prompts.limits(params), bool(answer.request.stream)
            except RequestError as error:
                if error.field == "structured_outputs":  # the client may have given it by another name
                    raise BadRequestError(str(error), param=form_of(vars(answer.request))[0]) from error
                raise
            wants_deltas = is_streamed or answer.wants_deltas
            how = dict(name=answer.name, wants_deltas=wants_deltas, arrival=arrival, charge=charge)
            stream = RequestStream(answer.prompts, params, limits, **how)
            await engine.submit(stream)
            if is_streamed:
                num_read = partial(engine.requests.prompt_tokens, stream)
                sent = partial(self._next.expect, answer)
                return EventStream(stream, answer, num_read, engine.prompts.write, sent, self._pause)
            response = await whole_answer(stream, answer, request.receive, engine.prompts.write)
            self._next.expect(answer)
            return response

    async def reply(
        self, request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, bytes]], max_bytes: int
    ) -> Response:
        """Answer a request with JSON that needs no engine. `prepare` is called with a body of at most `max_bytes`."""
        with ExitStack() as charge:
            body = await self._read(request, charge, max_bytes)
            content = await while_client_stays(request.receive, prepare(body))
        return Response(content, media_type="application/json")

    async def _read(self, request: Request, charge: ExitStack, max_bytes: int) -> bytes:
        return await read_body(request, self.engine.waiting, charge, timeout=self._body_timeout, max_bytes=max_bytes)


def _too_many(answer: Answer, limit: int) -> BadRequestError | None:
    """Return the refusal of an explicit number of tokens beyond max_model_len, as vLLM has it: the engine would just
    cut the output."""
    asked, longest = answer.request.token_limit, max(len(token_ids) for _, token_ids in answer.prompts)
    if asked is None or longest + asked <= limit:
        return None
    return BadRequestError(
        f"the prompt has {longest} tokens and max_tokens is {asked}, together they may be max_model_len = {limit}: "
        "lower max_tokens or shorten the prompt",
        param="max_tokens",
        code=TOO_LONG,
    )
