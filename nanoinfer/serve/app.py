"""The HTTP application: endpoints, errors and the gate before them."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import nanoinfer
from nanoinfer.errors import RequestError
from nanoinfer.serve.answers import Answer, ChatAnswer, CompletionAnswer
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.errors import ApiError, BadRequestError, UnavailableError
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
from nanoinfer.serve.request_stream import StreamClosedError
from nanoinfer.serve.responding import EventStream, read_body, whole_answer
from nanoinfer.serve.token_answers import MAX_TOKENIZING_BYTES, detokenized, tokenized
from nanoinfer.serve.tokenizing import Prompt

GUARDED = ("/v1", "/tokenize", "/detokenize")  # starts of the paths that need the API key
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API
TOO_LONG = "context_length_exceeded"


def create_app(
    engine: AsyncEngine,
    *,
    served_model_names: Sequence[str],
    api_key: str | None = None,
    shutdown_timeout: float = 30.0,
) -> FastAPI:
    """The application over an engine that was started.

    Args:
        served_model_names: names that clients may call the model; answers carry the one that was asked for.
        api_key: what clients must send as bearer token for the paths that are `GUARDED`; None: nothing.
        shutdown_timeout: seconds that running requests have to end after the application is told to shut down.
    """
    metrics = ServerMetrics(engine)
    engine.on_finished = metrics.observe

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.begin_shutdown()
        await engine.drain(shutdown_timeout)
        # Blocks the loop, which has nothing else to do.
        engine.close()

    app = FastAPI(lifespan=lifespan, title="nanoinfer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Gate, metrics=metrics, api_key=api_key)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StreamClosedError, _client_left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    _add_generation(app, engine, list(served_model_names))
    _add_tokenizing(app, engine, list(served_model_names))
    _add_models(app, engine, list(served_model_names))

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        if engine.is_healthy:
            return Response()
        raise UnavailableError("the engine is not running or the server is shutting down", "unhealthy")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": nanoinfer.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(await engine.stats()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_generation(app: FastAPI, engine: AsyncEngine, names: list[str]) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrival = time.perf_counter()
        asked = parse(CompletionRequest, await read_body(request))
        model = _model_name(asked, names)
        params = asked.sampling_params(engine.sampling_defaults | {"max_tokens": DEFAULT_MAX_TOKENS})
        with _refusing(asked):
            prompts = [await engine.prompts.tokenize(prompt) for prompt in asked.prompts]
        echoed = [await engine.prompts.text_of(prompt) for prompt in prompts] if asked.echo else None
        answer = CompletionAnswer(asked, model, prompts, engine.prompts.has_text, echoed=echoed)
        return await respond(request, answer, params, arrival)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        arrival = time.perf_counter()
        asked = parse(ChatRequest, await read_body(request))
        model = _model_name(asked, names)
        params = asked.sampling_params({"max_tokens": None} | engine.sampling_defaults)  # None: what the prompt leaves
        with _refusing(asked):
            prompt = await engine.prompts.tokenize_chat(asked.conversation(), asked.template_arguments)
        answer = ChatAnswer(asked, model, [prompt], engine.prompts.has_text)
        return await respond(request, answer, params, arrival)

    async def respond(request: Request, answer: Answer, params: Any, arrival: float) -> Response:
        asked = answer.request
        _check_length(asked, answer.prompts, engine.plan.max_model_len)
        with _refusing(asked):
            stream = await engine.submit(answer.prompts, params, wants_deltas=bool(asked.stream), arrival=arrival)
        if asked.stream:
            return EventStream(stream, answer)
        return await whole_answer(stream, answer, request.receive)


def _add_tokenizing(app: FastAPI, engine: AsyncEngine, names: list[str]) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        def work(asked: TokenizeRequest) -> bytes:
            return tokenized(asked, engine.prompts.tokenizer, engine.plan.max_model_len)

        return await respond(request, TokenizeRequest, work)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        def work(asked: DetokenizeRequest) -> bytes:
            return detokenized(asked, engine.prompts.tokenizer, engine.prompts.check_vocabulary)

        return await respond(request, DetokenizeRequest, work)

    async def respond(request: Request, kind: type[Body], work: Callable[[Any], bytes]) -> Response:
        asked = parse(kind, await read_body(request, MAX_TOKENIZING_BYTES))
        _model_name(asked, names)
        with _refusing(asked):
            return Response(await engine.prompts.aside(lambda: work(asked)), media_type="application/json")


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
        if name not in names:
            raise _no_such_model(name, names)
        return card(name)


def _model_name(asked: Body, names: list[str]) -> str:
    if asked.model is None:
        return names[0]
    if asked.model not in names:
        raise _no_such_model(asked.model, names)
    return asked.model


def _no_such_model(name: str, names: list[str]) -> ApiError:
    return BadRequestError(
        f"the model {name[:200]!r} is not served here: use {' or '.join(map(repr, names))}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _check_length(asked: GenerationRequest, prompts: list[Prompt], limit: int) -> None:
    """The engine would cut the output at max_model_len; who asks for a number of tokens is told, as by vLLM."""
    longest = max(len(token_ids) for _, token_ids in prompts)
    if asked.token_limit is not None and longest + asked.token_limit > limit:
        raise BadRequestError(
            f"the prompt has {longest} tokens and max_tokens is {asked.token_limit}, together they may be "
            f"max_model_len = {limit}: lower max_tokens or shorten the prompt",
            param="max_tokens",
            code=TOO_LONG,
        )


@contextlib.contextmanager
def _refusing(asked: Body):
    """What the engine cannot take is a mistake of the client's."""
    try:
        yield
    except RequestError as error:
        raise BadRequestError(
            str(error),
            param=asked.prompt_field if error.field == "prompt" else error.field,
            code=TOO_LONG if error.is_too_long else None,
        ) from error


# Errors


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _api_error(_: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _client_left(*_: Any) -> Response:
    return Response(status_code=499)  # nobody reads it; the name that proxies have for it in their logs


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = _error_response(BadRequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _unexpected_error(*_: Any) -> Response:
    return _error_response(ApiError("the server failed on this request: look into its log", code="internal_error"))


class _Gate:
    """Checks the API key and counts answers. Plain ASGI: what stands here is passed by every event of a stream."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, api_key: str | None) -> None:
        self._app, self._metrics = app, metrics
        self._token = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route, not the path, of which clients can make up any number.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.count_response(path, message["status"])
            await send(message)

        if self._may_pass(scope):
            await self._app(scope, receive, counting)
            return
        error = BadRequestError(
            "the API key is missing or wrong: send the header Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )
        await _error_response(error)(scope, receive, counting)

    def _may_pass(self, scope: Scope) -> bool:
        if self._token is None or not scope["path"].startswith(GUARDED):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._token)
