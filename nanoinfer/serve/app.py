"""The HTTP application: endpoints, errors and the gates that requests pass first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import nanoinfer
from nanoinfer.common.errors import RequestError
from nanoinfer.common.other_names import NO_PATHS, PATHS
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.serve.agents import agent_routes
from nanoinfer.serve.answers import ChatAnswer, CompletionAnswer
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.client import DEFAULT_BODY_SECONDS, error_response
from nanoinfer.serve.docs_page import DOCS_HEADERS, docs_page
from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.errors import MESSAGES, ApiError, BadRequestError
from nanoinfer.serve.fields import Fields
from nanoinfer.serve.gate import Counting, Gate, WithoutSlash, check_framing, check_origin, check_request
from nanoinfer.serve.log_lines import log_load
from nanoinfer.serve.metrics import ServerMetrics
from nanoinfer.serve.partings import Parting
from nanoinfer.serve.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nanoinfer.serve.request_stream import ReaderLeft
from nanoinfer.serve.responder import TOO_LONG, Prepared, Responder
from nanoinfer.serve.token_answers import MAX_TOKENIZING_BYTES, detokenized, tokenized
from nanoinfer.serve.tokenizing import PromptTokenizer
from nanoinfer.serve.watching import watching_routes

Work = Callable[[Any, PromptTokenizer, ChatTemplate], bytes]
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API
_PROMPT_FIELDS = {"/v1/responses": "input", "/detokenize": "tokens"}
_PROMPT_FIELDS |= dict.fromkeys(("/v1/chat/completions", MESSAGES, f"{MESSAGES}/count_tokens"), "messages")
# Elsewhere the prompt is in "prompt".


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """What clients may ask of a server, and how.

    Attributes:
        served_model_names: names that clients may use for the model; an answer has the name that its request used.
        api_key: bearer token that clients must send for the `GUARDED` paths; None: no token is needed.
        allowed_origins: origins of web pages that may use the server, in the form that browsers send; "*": all.
        body_timeout: seconds in which a request's body must arrive.
        strict: refuse fields with names that no API has, instead of ignoring them with a line in the log.
        images: what becomes of images in a conversation: "refuse", or "replace": a text stands in their place.
        special_tokens: what texts in a conversation are that look like special tokens: these ("control"), or "text".
        tool_call_parser, reasoning_parser: as of `AnswerFormat.of`.
        page: whether there is a page at `/`.
    """

    served_model_names: Sequence[str]
    api_key: str | None = None
    allowed_origins: Sequence[str] = ()
    body_timeout: float = DEFAULT_BODY_SECONDS
    strict: bool = False
    images: str = "refuse"
    special_tokens: str = "control"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    page: bool = True


def create_app(
    engine: AsyncEngine, settings: AppSettings, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> Starlette:
    """Make the application for an engine that was started, and that the caller closes.

    sleep: waits for so many seconds between two looks at whether a stream is silent.
    """
    metrics = ServerMetrics(engine)

    def finished(ended: EndedRequest) -> None:
        metrics.observe(ended)
        engine.log.take(ended)

    def parted(parting: Parting) -> None:
        metrics.observe_parting(parting)
        engine.requests.note_parting(parting)

    engine.requests.on_finished, engine.requests.on_load = finished, log_load
    engine.log.on_parted = parted
    tokenizer = engine.prompts.tokenizer
    parsers = dict(tool_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser)
    form = AnswerFormat.of_tokenizer(tokenizer, **parsers)
    engine.prompts.intake.form = form  # budgets of thinking go by it
    template = ChatTemplate(tokenizer, form, spells_special=settings.special_tokens == "text")
    fields = Fields(refuses_unknown=settings.strict, replaces_images=settings.images == "replace")
    responder = Responder(engine, settings.served_model_names, fields, template, settings.body_timeout, sleep)
    routes = [
        *_generation_routes(responder),
        *agent_routes(responder),
        *_tokenizing_routes(responder),
        *_models_routes(responder),
        *_health_routes(engine, metrics),
        *watching_routes(engine),
    ]
    if settings.page:
        from nanoinfer.serve.page_files import page_routes  # whose files nothing else needs

        routes += page_routes()
    for route in routes:
        route.methods.discard("HEAD")  # which Starlette adds to GET
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # `WithoutSlash` has dealt with them
    _add_gates(app, metrics, settings.api_key, settings.allowed_origins)
    return app


def _add_gates(app: Starlette, metrics: ServerMetrics, api_key: str | None, allowed_origins: Sequence[str]) -> None:
    """Add what a request passes before its path is looked at, and what becomes of errors."""
    # A request passes the middleware added last first. CORS comes before the API key, because a browser's preflight
    # request has no key, and browsers must be able to read errors, too.
    app.add_middleware(Gate, refusal=partial(check_request, api_key=api_key, routes=app.routes))
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(Gate, refusal=partial(check_origin, allowed=allowed_origins))
    app.add_middleware(Gate, refusal=check_framing)
    app.add_middleware(WithoutSlash)
    app.add_middleware(Counting, metrics=metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(ReaderLeft, _client_left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


def _health_routes(engine: AsyncEngine, metrics: ServerMetrics) -> list[Route]:
    async def health(_: Request) -> Response:
        engine.check_health()
        return Response()

    async def docs(_: Request) -> Response:
        return Response(docs_page(), headers=DOCS_HEADERS, media_type="text/html")

    async def version(_: Request) -> Response:
        return JSONResponse({"version": nanoinfer.__version__})

    async def prometheus(_: Request) -> Response:
        return Response(metrics.render(await engine.figures()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/health", health),
        *(Route("/ping", health, methods=[method]) for method in ("POST", "GET")),
        Route("/docs", docs),
        Route("/version", version),
        Route("/metrics", prometheus),
    ]


def _generation_routes(responder: Responder) -> list[Route]:
    engine = responder.engine

    async def completions(request: Request) -> Response:
        return await responder.generate(request, completion_answer)

    async def chat(request: Request) -> Response:
        return await responder.generate(request, chat_answer)

    async def completion_answer(body: bytes) -> Prepared:
        asked = await responder.parsed(CompletionRequest, body)
        model = responder.model_name(asked.model)
        params = asked.sampling_params(engine.sampling_defaults | {"max_tokens": DEFAULT_MAX_TOKENS})
        prompts = [await engine.prompts.tokenize(prompt) for prompt in asked.prompts]
        echoed, has_logprobs = None, asked.echoes_logprobs
        if asked.echo:
            echoed = [await engine.prompts.echo_of(prompt, has_logprobs=has_logprobs) for prompt in prompts]
        has_text, token_bytes = engine.prompts.has_text, engine.prompts.token_bytes
        return CompletionAnswer(asked, model, prompts, has_text, echoed, token_bytes), params

    async def chat_answer(body: bytes) -> Prepared:
        return await responder.chat(await responder.parsed(ChatRequest, body), len(body), ChatAnswer)

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]


def _tokenizing_routes(responder: Responder) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        return await reply(request, TokenizeRequest, tokenized)

    async def detokenize(request: Request) -> Response:
        return await reply(request, DetokenizeRequest, detokenized)

    async def reply(request: Request, kind: type[Body], work: Work) -> Response:
        async def answer(body: bytes) -> bytes:
            asked, prompts = await responder.parsed(kind, body), responder.engine.prompts
            responder.model_name(asked.model)
            return await prompts.aside(len(body), lambda: work(asked, prompts, responder.template))

        return await responder.reply(request, answer, MAX_TOKENIZING_BYTES)

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


def _models_routes(responder: Responder) -> list[Route]:
    created, engine = int(time.time()), responder.engine

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "nanoinfer",
            "root": str(engine.config.model),
            "max_model_len": engine.plan.max_model_len,
        }

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in responder.names]})

    async def model(request: Request) -> Response:
        return JSONResponse(card(responder.model_name(request.path_params["name"])))

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]


# Errors


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.url.path)


async def _request_error(request: Request, error: RequestError) -> Response:
    """Blame the client's request for a refusal by the engine."""
    field = _PROMPT_FIELDS.get(request.url.path, "prompt") if error.field == "prompt" else error.field
    refused = BadRequestError(
        str(error), param=field, code=TOO_LONG if error.is_too_long else None, lengths=error.lengths
    )
    return error_response(refused, request.url.path)


async def _client_left(*_: Any) -> Response:
    return Response(status_code=499)  # nobody reads it; proxies use this status in their logs


async def _http_error(request: Request, error: HTTPException) -> Response:
    path, paths = request.url.path[:200], _paths(request.app)
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == 404:
        named = path.removeprefix("/v1/v1").removesuffix("/") or "/"
        nearest = PATHS.get(named) or next(iter(get_close_matches(path, paths, n=1, cutoff=0.7)), None)
        hint = f" (did you mean {nearest}?)" if nearest else ""
        if named in NO_PATHS:
            hint = f", as {NO_PATHS[named]}"
        message = f"there is no path {path}{hint}: there are {', '.join(paths)}"
    elif error.status_code == 405:
        message += f": use {(error.headers or {}).get('Allow', 'another method')}"
    response = error_response(BadRequestError(message, status=error.status_code), path)
    response.headers.update(error.headers or {})
    return response


def _paths(app: Starlette) -> list[str]:
    """Return the paths of the API, which the page's is none of."""
    return sorted({route.path for route in app.routes if "{" not in route.path and route.path != "/"})


async def _unexpected_error(request: Request, _: Exception) -> Response:
    error = ApiError("the server failed on this request: look into its log", code="internal_error")
    return error_response(error, request.url.path)
