"""The endpoints that agents use: OpenAI's Responses API and Anthropic's Messages API, on the pipeline of chats."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from nanoinfer.serve.answers import Answer
from nanoinfer.serve.errors import MESSAGES, BadRequestError
from nanoinfer.serve.messages_answer import MessagesAnswer
from nanoinfer.serve.messages_request import CountRequest, MessagesRequest
from nanoinfer.serve.responder import Prepared, Responder
from nanoinfer.serve.responses_answer import ResponsesAnswer
from nanoinfer.serve.responses_request import SEND_ITEMS, ResponsesRequest
from nanoinfer.serve.token_answers import MAX_TOKENIZING_BYTES, counted


def add_agents(app: FastAPI, responder: Responder) -> None:
    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await responder.generate(request, responses_answer)

    @app.get("/v1/responses/{name:path}")
    @app.delete("/v1/responses/{name:path}")
    @app.post("/v1/responses/{name:path}")
    async def kept(name: str) -> Response:
        raise BadRequestError(f"there is no response {name[:200]!r}: {SEND_ITEMS}", status=404)

    @app.post(MESSAGES)
    async def messages(request: Request) -> Response:
        return await responder.generate(request, messages_answer)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        return await responder.reply(request, number_of_tokens, MAX_TOKENIZING_BYTES)

    async def responses_answer(body: bytes) -> Prepared:
        asked, chat = await responder.parsed_chat(ResponsesRequest, body)
        answer: type[Answer] = partial(ResponsesAnswer, asked)
        return await responder.chat(chat, len(body), answer)

    async def messages_answer(body: bytes) -> Prepared:
        _, chat = await responder.parsed_chat(MessagesRequest, body)
        return await responder.chat(chat, len(body), MessagesAnswer)

    async def number_of_tokens(body: bytes) -> bytes:
        _, chat = await responder.parsed_chat(CountRequest, body)
        responder.model_name(chat.model)
        prompts = responder.engine.prompts
        return await prompts.aside(len(body), lambda: counted(chat, prompts, responder.template))
