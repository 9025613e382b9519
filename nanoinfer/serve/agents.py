"""The endpoints that agents use: OpenAI's Responses API and Anthropic's Messages API, on the pipeline of chats."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanoinfer.serve.answers import Answer
from nanoinfer.serve.errors import MESSAGES, BadRequestError
from nanoinfer.serve.messages_answer import MessagesAnswer
from nanoinfer.serve.messages_request import CountRequest, MessagesRequest
from nanoinfer.serve.responder import Prepared, Responder
from nanoinfer.serve.responses_answer import ResponsesAnswer
from nanoinfer.serve.responses_request import SEND_ITEMS, ResponsesRequest
from nanoinfer.serve.token_answers import MAX_TOKENIZING_BYTES, counted


def agent_routes(responder: Responder) -> list[Route]:
    async def responses(request: Request) -> Response:
        return await responder.generate(request, responses_answer)

    async def kept(request: Request) -> Response:
        name = request.path_params["name"]
        raise BadRequestError(f"there is no response {name[:200]!r}: {SEND_ITEMS}", status=404)

    async def messages(request: Request) -> Response:
        return await responder.generate(request, messages_answer)

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

    return [
        Route("/v1/responses", responses, methods=["POST"]),
        *(Route("/v1/responses/{name:path}", kept, methods=[method]) for method in ("POST", "DELETE", "GET")),
        Route(MESSAGES, messages, methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", count_tokens, methods=["POST"]),
    ]
