"""`nanoinfer serve` on the command line."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import nanoinfer
from nanoinfer.common.units import counted, parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.parser import INTERRUPTED, Parser
from nanoinfer.serve.log import FORMATS, LEVELS, START, logging_to

logger = logging.getLogger("nanoinfer")

_CLOSING_SECONDS = 5.0  # for clients to read the ends of their answers
_FORCED_SECONDS = 0.5  # the same after a second SIGINT


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, GGUF file or hub id")
    parser.add_argument("--host", default="127.0.0.1", help='"0.0.0.0": all interfaces (default: %(default)s)')
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that clients use (default: MODEL)"
    )
    parser.add_argument("--api-key", help="key that clients must send for /v1, /tokenize, /detokenize (default: none)")
    add_engine_options(parser, defaults={"enable_cpu_offload": "auto"})
    clients = parser.add_argument_group("clients and their requests")
    clients.add_argument(
        "--allowed-origins", default="[]", metavar="JSON",
        help="web pages that may use the server from a browser, such as '[\"http://localhost:3000\"]'; "
        "'[\"*\"]': all (default: none)",
    )  # fmt: skip
    clients.add_argument(
        "--max-queue", type=int, default=1024, help="waiting sequences beyond which the answer is 429 (%(default)s)"
    )
    clients.add_argument(
        "--max-queue-bytes", default="256MiB", metavar="SIZE",
        help="bytes of waiting requests beyond which the answer is 429 (%(default)s)",
    )  # fmt: skip
    clients.add_argument(
        "--strict", action="store_true",
        help="refuse fields of requests with names that no API has (default: ignore them, with a line in the log)",
    )  # fmt: skip
    for name, seconds, text in (
        ("--body-timeout", 60.0, "for the head of a request to arrive, and for its body"),
        ("--max-step-seconds", 120.0, "a step that runs for longer makes /health say 503"),
        ("--shutdown-timeout", 30.0, "for running requests to end after SIGTERM or SIGINT"),
    ):
        clients.add_argument(name, type=float, default=seconds, metavar="SECONDS", help=f"{text} (%(default)s)")
    log = parser.add_argument_group("log")
    log.add_argument(
        "--log-level", choices=LEVELS, default="info",
        help="info: a line for each request, and one every ten seconds under load; debug: also uvicorn's for each HTTP "
        "answer, and the text where a prompt parted from a recent one (%(default)s)",
    )  # fmt: skip
    log.add_argument("--log-format", choices=FORMATS, default="text", help="json: one JSON object a line (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; return 0, or 1 if the engine failed."""
    with logging_to(options.log_level, options.log_format):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from nanoinfer.serve.app import create_app
        from nanoinfer.serve.async_engine import AsyncEngine
        from nanoinfer.serve.connection import server_config
        from nanoinfer.serve.gate import allowed_origins
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: in the clone, pip install -e '.[serve]'") from error
    if options.api_key == "":  # as of a variable that is not set: anybody could guess it
        raise ValueError("--api-key is empty: give a key, or leave the option out to serve without one")
    if not options.shutdown_timeout >= 0:  # also where it is NaN
        raise ValueError(f"--shutdown-timeout is {options.shutdown_timeout}, it must be 0 or more seconds")
    for name in ("body_timeout", "max_step_seconds"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be more than 0 seconds")
    origins = allowed_origins(options.allowed_origins)
    max_queue_bytes = parse_bytes(options.max_queue_bytes, "--max-queue-bytes")
    shows_bar = sys.stderr.isatty() and options.log_format == "text"
    config = EngineConfig(model=options.model, progress_bar=shows_bar, **engine_arguments(options))
    # Bind the port before the model is loaded, because loading takes long. The socket does not listen yet.
    with _bind(options.host, options.port) as listener:
        engine = AsyncEngine(
            lambda: nanoinfer.LLMEngine(config),
            max_queue=options.max_queue,
            max_queue_bytes=max_queue_bytes,
            max_step_seconds=options.max_step_seconds,
        )
        try:
            _start(engine)
            app = create_app(
                engine,
                served_model_names=options.served_model_name or [options.model],
                api_key=options.api_key,
                allowed_origins=origins,
                body_timeout=options.body_timeout,
                strict=options.strict,
            )
            logger.info("%s mode; %s", engine.mode, engine.plan.one_line())
            settings = server_config(app, options.body_timeout, logs_access=options.log_level == "debug")
            _serve(server_class(uvicorn.Server)(settings, engine, options.shutdown_timeout), listener)
        finally:
            engine.close()
            gc.unfreeze()  # to libraries that look for leaks at the end, frozen objects are some
    return 0 if engine.failure is None else 1


def _start(engine: Any) -> None:
    try:
        engine.start()
        # A garbage collection over all imported and loaded objects takes up to a second and stops everything else. None
        # of these objects ever becomes garbage, so exclude them from later collections.
        gc.collect()
        gc.freeze()
    except KeyboardInterrupt:
        logger.warning("interrupted while the model was loaded")
        # The loading thread cannot be stopped, and a normal exit of the interpreter aborts while that thread runs.
        os._exit(INTERRUPTED)


def _serve(server: Any, listener: socket.socket) -> None:
    # uvicorn raises the signal that ended it once more, for the handler that was set before. That must not be the
    # default handler, which would kill a process that has just ended properly.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn raises SIGINT once more, too
    finally:
        signal.signal(signal.SIGTERM, before)


def server_class(base: type, closing_seconds: float = _CLOSING_SECONDS) -> type:
    class Server(base):
        """uvicorn's server, but it still answers (503 and /health) while the running requests end."""

        def __init__(self, config: Any, engine: Any, shutdown_timeout: float) -> None:
            super().__init__(config)
            self._engine, self._shutdown_timeout = engine, shutdown_timeout

        async def startup(self, sockets: list[socket.socket]) -> None:
            await super().startup(sockets)
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logging.getLogger(START).info("serving on http://%s:%d", shown, port)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._engine.begin_shutdown()
            running = counted(self._engine.num_streams, "request")
            logger.info(
                "shutting down; %s may run for %g s, Ctrl-C again ends them now", running, self._shutdown_timeout
            )
            draining = asyncio.create_task(self._engine.drain(self._shutdown_timeout))
            while not draining.done() and not self.force_exit:  # a second SIGINT forces the exit
                await asyncio.wait({draining}, timeout=0.1)
            seconds = closing_seconds
            if not draining.done():
                draining.cancel()
                await self._engine.drain(0)
                self.force_exit, seconds = False, min(seconds, _FORCED_SECONDS)
            await self._end_connections(seconds)
            self.force_exit = False  # nothing runs any more, so an orderly end is fast
            await super().shutdown(sockets)
            self._engine.close()  # here, because a signal that comes meanwhile is still caught

        async def _end_connections(self, seconds: float) -> None:
            """Let clients read the ends of their answers, and cut the connections of those that do not."""
            for server in self.servers:
                server.close()  # nobody connects any more
            connections, deadline = self.server_state.connections, time.monotonic() + seconds
            for connection in list(connections):
                connection.shutdown()
            while connections and time.monotonic() < deadline and not self.force_exit:
                await asyncio.sleep(0.05)
            if connections:
                logger.info("%s did not read to the end", counted(len(connections), "client"))
            for connection in list(connections):
                connection.transport.abort()

    return Server


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port} cannot be used ({error}): choose another") from error
    return listener
