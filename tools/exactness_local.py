"""A server in this process, for the time of a `with` block."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine

_START_SECONDS = 60


@contextmanager
def local_server(arguments: dict[str, Any], max_queue: int) -> Iterator[str]:
    """Run a server with an engine of these arguments on a free port of this machine; yield its address.

    Omitted parameters of a request have the defaults of `SamplingParams`, not those that the checkpoint recommends.

    Raises ModuleNotFoundError where packages of the server are missing, ValueError where it does not start.
    """
    import uvicorn  # an optional package, like those of the application

    from nanoinfer.serve.app import create_app
    from nanoinfer.serve.async_engine import AsyncEngine
    from nanoinfer.serve.client import DEFAULT_BODY_SECONDS
    from nanoinfer.serve.connection import server_config

    config = EngineConfig(**arguments | dict(generation_config="vllm"))
    engine = AsyncEngine(lambda: LLMEngine(config), max_queue=max_queue)
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(engine, served_model_names=["model"])
        server = uvicorn.Server(server_config(app, DEFAULT_BODY_SECONDS))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="local-server")
        try:
            thread.start()
            deadline = time.monotonic() + _START_SECONDS
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise ValueError(
                        f"the server did not start within {_START_SECONDS} seconds: look at its output above"
                    )
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            engine.close()
