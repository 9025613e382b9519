"""A server of a tiny model for a browser, which can be cut off and come back; and what a tab does that it must not."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn
from engines import make_engine

from nanoinfer.serve.app import AppSettings, create_app
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.connection import server_config


class Site:
    """A server on a port of its own, which can be cut off and come back."""

    def __init__(self, path, *, api_key=None, **arguments):
        self.engine = None

        def make():
            self.engine = make_engine(path, **(dict(skip_tokenizer_init=False) | arguments))
            return self.engine

        self.async_engine = AsyncEngine(make)
        self.async_engine.start()
        self.app = create_app(self.async_engine, AppSettings(served_model_names=["tiny"], api_key=api_key))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.begin()

    def begin(self):
        class Server(uvicorn.Server):
            def install_signal_handlers(self):
                pass

        config = server_config(self.app, 60)
        config.host, config.port = "127.0.0.1", self.port
        self._server = Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server has not started"
            time.sleep(0.01)

    def cut_off(self):
        """End all connections, and take no more."""
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            self._server.servers[0].get_loop().call_soon_threadsafe(connection.transport.abort)
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def close(self):
        self.cut_off()
        self.async_engine.close()


@contextmanager
def site(path, **arguments):
    made = Site(path, **arguments)
    try:
        yield made
    finally:
        made.close()


class Watch:
    """What a tab does that it must not."""

    def __init__(self, page, url):
        self.errors, self.requests, self.url = [], [], url
        page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("popup", lambda _: self.errors.append("a window was opened"))

    @property
    def foreign(self):
        return [url for url in self.requests if not url.startswith((self.url, "data:"))]

    def check(self):
        assert self.errors == [] and self.foreign == []


def until(page, expression, seconds=20):
    """Wait until an expression holds in a tab. Playwright's own wait evaluates texts, which the page refuses."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"waited in vain for {expression}"
        page.wait_for_timeout(20)
