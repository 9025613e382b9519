"""`nanoinfer serve` on the command line."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nanoinfer.commands.model import prepare
from nanoinfer.common.other_names import ENVIRONMENT
from nanoinfer.common.units import counted
from nanoinfer.options.parser import INTERRUPTED, in_options
from nanoinfer.options.serve import check_alone, replicas_of
from nanoinfer.serve.log import START, logging_to

logger = logging.getLogger("nanoinfer")

_CLOSING_SECONDS = 5.0  # for clients to read the ends of their answers
_FORCED_SECONDS = 0.5  # the same after a second SIGINT
LAST_SECONDS = 5.0  # from then until the process ends, whatever runs


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; return 0, or 1 if the engine failed."""
    with logging_to(options.log_level, options.log_format):
        given = {word.partition("=")[0] for word in options.command_line.split()}
        for name, instead in ENVIRONMENT.items():
            if name in os.environ and not given & {*instead.split()}:
                logger.warning("the environment variable %s is not read here: give %s", name, instead)
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.ray:
        _prepared(options)
        return _run_replicas(options)
    check_alone(options)
    # Bind the port before a model is downloaded and loaded, because that takes long. The socket does not listen yet.
    with _bind(options.host, options.port) as listener:
        settings = _prepared(options)
        import uvicorn

        from nanoinfer.serve.connection import server_config
        from nanoinfer.serve.descriptors import make_room

        engine = settings.make_engine()
        try:
            _start(engine)
            app = settings.make_app(engine)
            logger.info("%s", in_options(engine.plan.one_line(engine.mode), options.parser))
            logs_access, room = options.log_level == "debug", make_room()
            config = server_config(app, settings.app.body_timeout, logs_access=logs_access, max_connections=room)
            _serve(server_class(uvicorn.Server)(config, engine, settings.shutdown_timeout), listener)
        finally:
            engine.close()
            gc.unfreeze()  # to libraries that look for leaks at the end, frozen objects are some
    return 0 if engine.failure is None else 1


def _prepared(options: argparse.Namespace) -> Any:
    """Say what will be loaded, and return the server's settings; ValueError: these, or what is installed, do not do."""
    try:
        import uvicorn  # noqa: F401 - of the extra, before a model is downloaded; what is below imports torch

        prepare(options, takes_text=False, say=logger.info)
        from nanoinfer.serve.settings import settings_of
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: in the clone, pip install -e '.[serve]'") from error
    return settings_of(options)


def _run_replicas(options: argparse.Namespace) -> int:
    try:
        from nanoinfer.serve.ray.running import serve_replicas
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed: in the clone, pip install -e '.[ray]'") from error
    with _bind(options.host, options.port) as listener:  # Ray would try for long
        port = listener.getsockname()[1]
    return serve_replicas(options, replicas_of(options), port)


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


def end_anyway() -> None:
    """Have the process end soon, whatever its threads do: one may be within a library, which nothing ends."""
    timer = threading.Timer(LAST_SECONDS, os._exit, [INTERRUPTED])
    timer.daemon = True
    timer.start()


def server_class(
    base: type, closing_seconds: float = _CLOSING_SECONDS, at_second_interrupt: Callable[[], None] = end_anyway
) -> type:
    class Server(base):
        """uvicorn's server, but it still answers (503 and /health) while the running requests end."""

        def __init__(self, config: Any, engine: Any, shutdown_timeout: float) -> None:
            super().__init__(config)
            self._engine, self._shutdown_timeout = engine, shutdown_timeout

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit and sig == signal.SIGINT:  # the second one
                at_second_interrupt()
            super().handle_exit(sig, frame)

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
        raise ValueError(_why_not_bound(host, port, error)) from error
    return listener


def _why_not_bound(host: str, port: int, error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"port {port} is in use: give another with --port, such as {port % 65535 + 1}, or 0 for any free one"
    if number == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine: give 127.0.0.1, or 0.0.0.0 for all that it has"
    if number == errno.EACCES:
        return f"port {port} needs rights that this user lacks: give one from 1024 on with --port"
    return f"--host {host} --port {port} cannot be used ({error}): choose another"
