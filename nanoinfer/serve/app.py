"""The HTTP application: endpoints, errors and the gates that requests pass first."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import nanoinfer
from nanoinfer.common.errors import RequestError
from nanoinfer.common.other_names import PATHS
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.answers import Answer, ChatAnswer, CompletionAnswer
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.client import (
    DEFAULT_BODY_SECONDS,
    EventStream,
    error_response,
    read_body,
    while_client_stays,
    whole_answer,
)
from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.errors import ApiError, BadRequestError
from nanoinfer.serve.gate import Counting, Gate, WithoutSlash, check_framing, check_origin, check_request
from nanoinfer.serve.log_lines import log_load
from nanoinfer.serve.metrics import ServerMetrics
from nanoinfer.serve.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from nanoinfer.serve.request_stream import ReaderLeft, RequestStream
from nanoinfer.serve.token_answers import MAX_TOKENIZING_BYTES, detokenized, tokenized
from nanoinfer.serve.tokenizing import Prompt, PromptTokenizer

_LARGE_BODY_BYTES = 65_536  # parsing takes about a millisecond
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API
TOO_LONG = "context_length_exceeded"
_PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/detokenize": "tokens"}  # elsewhere the prompt is in "prompt"
B = TypeVar("B", bound=Body)
ReadBody = Callable[..., Coroutine[Any, Any, bytes]]  # `read_body` with its timeout


def create_app(
    engine: AsyncEngine,
    *,
    served_model_names: Sequence[str],
    api_key: str | None = None,
    allowed_origins: Sequence[str] = (),
    body_timeout: float = DEFAULT_BODY_SECONDS,
) -> FastAPI:
    """Make the application for an engine that was started, and that the caller closes.

    Args:
        served_model_names: names that clients may use for the model; an answer has the name that its request used.
        api_key: bearer token that clients must send for the `GUARDED` paths; None: no token is needed.
        allowed_origins: origins of web pages that may use the server, in the form that browsers send; "*": all.
        body_timeout: seconds in which a request's body must arrive.
    """
    metrics = ServerMetrics(engine)

    def finished(ended: EndedRequest) -> None:
        metrics.observe(ended)
        engine.log.take(ended)

    engine.requests.on_finished, engine.requests.on_load = finished, log_load
    engine.log.on_parted = metrics.observe_parting
    app = FastAPI(title="nanoinfer", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    # A request passes the middleware added last first. CORS comes before the API key, because a browser's preflight
    # request has no key, and browsers must be able to read errors, too.
    app.add_middleware(Gate, refusal=partial(check_request, api_key=api_key))
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
    names, read = list(served_model_names), partial(read_body, timeout=body_timeout)
    _add_generation(app, engine, names, read)
    _add_tokenizing(app, engine, names, read)
    _add_models(app, engine, names)

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        engine.check_health()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": nanoinfer.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(await engine.stats()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _parsed(engine: AsyncEngine, kind: type[B], body: bytes) -> B:
    """Like `parse`, but large bodies are parsed on a thread, so that the event loop is not blocked."""
    if len(body) <= _LARGE_BODY_BYTES:
        return parse(kind, body)
    return await engine.prompts.read(len(body), lambda is_wanted: parse(kind, body, is_wanted))


def _add_generation(app: FastAPI, engine: AsyncEngine, names: list[str], read: ReadBody) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(request, completion_answer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await respond(request, chat_answer)

    async def completion_answer(body: bytes) -> tuple[Answer, SamplingParams]:
        asked = await _parsed(engine, CompletionRequest, body)
        model = _model_name(asked.model, names)
        params = asked.sampling_params(engine.sampling_defaults | {"max_tokens": DEFAULT_MAX_TOKENS})
        prompts = [await engine.prompts.tokenize(prompt) for prompt in asked.prompts]
        echoed = [await engine.prompts.text_of(prompt) for prompt in prompts] if asked.echo else None
        return CompletionAnswer(asked, model, prompts, engine.prompts.has_text, echoed), params

    async def chat_answer(body: bytes) -> tuple[Answer, SamplingParams]:
        asked = await _parsed(engine, ChatRequest, body)
        model = _model_name(asked.model, names)
        params = asked.sampling_params({"max_tokens": None} | engine.sampling_defaults)  # None: what the prompt leaves
        prompt = await engine.prompts.tokenize_chat(asked.conversation, asked.template_arguments, len(body))
        return ChatAnswer(asked, model, [prompt], engine.prompts.has_text), params

    async def respond(
        request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, tuple[Answer, SamplingParams]]]
    ) -> Response:
        arrival = time.perf_counter()
        with ExitStack() as charge:
            body = await read(request, engine.waiting, charge)
            answer, params = await while_client_stays(request.receive, prepare(body))
            del body  # the answer may take long
            asked = answer.request
            _check_length(asked, answer.prompts, engine.plan.max_model_len)
            limits, wants_deltas = await engine.prompts.limits(params), bool(asked.stream)
            how = dict(name=answer.name, wants_deltas=wants_deltas, arrival=arrival, charge=charge)
            stream = RequestStream(answer.prompts, params, limits, **how)
            await engine.submit(stream)
            if wants_deltas:
                return EventStream(stream, answer)
            return await whole_answer(stream, answer, request.receive)


def _add_tokenizing(app: FastAPI, engine: AsyncEngine, names: list[str], read: ReadBody) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await respond(request, TokenizeRequest, tokenized)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await respond(request, DetokenizeRequest, detokenized)

    async def respond(request: Request, kind: type[Body], work: Callable[[Any, PromptTokenizer], bytes]) -> Response:
        async def answer(body: bytes) -> bytes:
            asked = await _parsed(engine, kind, body)
            _model_name(asked.model, names)
            return await engine.prompts.aside(lambda: work(asked, engine.prompts))

        with ExitStack() as charge:
            body = await read(request, engine.waiting, charge, max_bytes=MAX_TOKENIZING_BYTES)
            content = await while_client_stays(request.receive, answer(body))
        return Response(content, media_type="application/json")


def _add_models(app: FastAPI, engine: AsyncEngine, names: list[str]) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "nanoinfer",
            "root": str(engine.config.model),
            "max_model_len": engine.plan.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(_model_name(name, names))


def _model_name(asked: str | None, names: list[str]) -> str:
    """Return the name that an answer shows; the first one if a request names no model."""
    if asked is None:
        return names[0]
    if asked not in names:
        raise BadRequestError(
            f"the model {asked[:200]!r} is not served here: use {' or '.join(map(repr, names))}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return asked


def _check_length(asked: GenerationRequest, prompts: list[Prompt], limit: int) -> None:
    """Refuse an explicit number of tokens beyond max_model_len, as vLLM does; the engine would just cut the output."""
    longest = max(len(token_ids) for _, token_ids in prompts)
    if asked.token_limit is not None and longest + asked.token_limit > limit:
        raise BadRequestError(
            f"the prompt has {longest} tokens and max_tokens is {asked.token_limit}, together they may be "
            f"max_model_len = {limit}: lower max_tokens or shorten the prompt",
            param="max_tokens",
            code=TOO_LONG,
        )


# Errors


async def _api_error(_: Request, error: ApiError) -> Response:
    return error_response(error)


async def _request_error(request: Request, error: RequestError) -> Response:
    """Blame the client's request for a refusal by the engine."""
    field = _PROMPT_FIELDS.get(request.url.path, "prompt") if error.field == "prompt" else error.field
    return error_response(BadRequestError(str(error), param=field, code=TOO_LONG if error.is_too_long else None))


async def _client_left(*_: Any) -> Response:
    return Response(status_code=499)  # nobody reads it; proxies use this status in their logs


async def _http_error(request: Request, error: HTTPException) -> Response:
    path, paths = request.url.path[:200], _paths(request.app)
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == 404:
        meant = PATHS.get(path.removeprefix("/v1/v1").removesuffix("/") or "/")
        nearest = meant or next(iter(get_close_matches(path, paths, n=1, cutoff=0.7)), None)
        hint = f" (did you mean {nearest}?)" if nearest else ""
        message = f"there is no path {path}{hint}: there are {', '.join(paths)}"
    elif error.status_code == 405:
        message += f": use {(error.headers or {}).get('Allow', 'another method')}"
    response = error_response(BadRequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


def _paths(app: FastAPI) -> list[str]:
    return sorted({route.path for route in app.routes if "{" not in route.path})


async def _unexpected_error(*_: Any) -> Response:
    error = ApiError("the server failed on this request: look into its log", code="internal_error")
    return error_response(error)
